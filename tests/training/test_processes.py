"""Several processes on one machine train as one does, and end together."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import jax
import pytest

from experiments.errors import InputError
from experiments.training.processes import is_one_of_several, join_processes
from tests.training import small_run

ROOT = pathlib.Path(__file__).parents[2]
CPU = dict(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="2", PYTHONPATH=str(ROOT))


def slurm(process: int, number: int) -> dict[str, str]:
  """Returns the environment that srun sets for a task on this machine."""
  return dict(
    SLURM_JOB_ID=str(os.getpid()),  # of which JAX makes the port
    SLURM_NTASKS=str(number),
    SLURM_PROCID=str(process),
    SLURM_LOCALID=str(process),
    SLURM_STEP_NODELIST="localhost",
    SLURM_STEP_NUM_NODES="1",
  )


def start(*arguments) -> list[subprocess.Popen]:
  """Starts two processes, as srun does."""
  words = [sys.executable, small_run.__file__, *map(str, arguments)]
  pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  first, second = (os.environ | CPU | slurm(process, 2) for process in (0, 1))
  return [subprocess.Popen(words, env=env, **pipes) for env in (first, second)]


def finish(processes) -> list[tuple[str, str]]:
  """Waits for the processes; returns what they print."""
  try:
    texts = [process.communicate(timeout=120) for process in processes]
  finally:
    for process in processes:
      process.kill()
      process.communicate()
  assert [process.returncode for process in processes] == [0, 0], texts
  return texts


def answers(texts):
  """Returns the losses and the signal of each process, in their order."""
  text = "".join(out for out, _ in texts)
  found = {}
  for line in re.findall(r"^\{.*$", text, re.MULTILINE):
    answer = json.loads(line)
    losses = {int(step): loss for step, loss in answer["losses"].items()}
    found[answer["process"]] = losses, answer["signal"]
  return found[0], found[1]


def test_two_processes_that_slurm_started_go_on_from_one_and_one_from_them(tmp_path):
  straight = small_run.run(tmp_path / "straight", 20, num_devices=4)
  folder = tmp_path / "checkpoints"
  losses = small_run.run(folder, 3, num_devices=4)

  one, other = answers(finish(start(folder, 20, 1, int(signal.SIGINT), 12)))
  first, received = one
  last = max(first)
  assert one == other
  assert received == "SIGINT"
  assert 12 <= last < 16
  assert {path.name for path in folder.iterdir()} == {"3", "10", str(last)}

  check_damage_that_one_alone_sees(tmp_path / "damaged", folder, first)
  losses |= first | small_run.run(folder, 20, num_devices=2)
  assert [*losses] == [*range(1, 21)]
  assert losses == pytest.approx(straight, rel=0, abs=1e-5)
  assert straight[20] < straight[1]


def check_damage_that_one_alone_sees(copy, folder, losses):
  """Damages the last checkpoint in a copy: both processes start from the one before."""
  last = max(losses)
  shutil.copytree(folder, copy)
  files = copy.glob(f"{last}/state/ocdbt.process_1/d/*")
  file = max(files, key=lambda file: file.stat().st_size)
  os.truncate(file, file.stat().st_size // 2)

  texts = finish(start(copy, last))
  for again, _ in answers(texts):
    assert again == {step: losses[step] for step in range(11, last + 1)}
  errors = "".join(err for _, err in texts)
  (line,) = [line for line in errors.splitlines() if "is damaged" in line]
  assert line.endswith(f": renamed to damaged-{last}")


BATCH_SCRIPT = {k: v for k, v in slurm(0, 2).items() if "STEP" not in k}


@pytest.mark.parametrize(
  "env, is_one",
  [
    (slurm(0, 2), True),
    ({"OMPI_COMM_WORLD_SIZE": "4"}, True),
    ({}, False),
    (slurm(0, 1), False),
    (BATCH_SCRIPT, False),
  ],
)
def test_an_environment_names_the_other_processes_if_there_are_any(env, is_one):
  assert is_one_of_several(env) == is_one


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_several_processes_on_gpus_use_no_cache_of_programs(
  backend, cache, monkeypatch
):
  monkeypatch.setattr(jax.distributed, "initialize", lambda **_: None)
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  join_processes(distributed=True)
  assert jax.config.jax_enable_compilation_cache == (backend == "tpu")


def test_a_wrong_environment_is_named():
  env = dict(JAX_COORDINATOR_ADDRESS="localhost:1", JAX_PROCESS_ID="x")
  words = r"cannot join the other processes .*'x'.*JAX_PROCESS_ID"
  with pytest.raises(InputError, match=words):
    join_processes(env=env)
