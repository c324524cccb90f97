"""Several processes on one machine train as one does, and end together."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
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


def start(*arguments, number: int = 2) -> list[subprocess.Popen]:
  command = [sys.executable, small_run.__file__, *map(str, arguments)]
  return [
    subprocess.Popen(
      command,
      env=dict(os.environ, **CPU, **slurm(process, number)),
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for process in range(number)
  ]


def finish(processes, seconds: float = 120) -> list[tuple[str, str]]:
  try:
    texts = [process.communicate(timeout=seconds) for process in processes]
  finally:
    for process in processes:
      process.kill()
      process.communicate()
  assert [process.returncode for process in processes] == [0] * len(processes), texts
  return texts


def answers(texts):
  lines = [
    line for out, _ in texts for line in out.splitlines() if line.startswith("{")
  ]
  found = sorted(map(json.loads, lines), key=lambda answer: answer["process"])
  return [
    ({int(k): v for k, v in answer["losses"].items()}, answer["signal"])
    for answer in found
  ]


def test_two_processes_that_slurm_started_go_on_from_one_and_one_from_them(tmp_path):
  straight = small_run.run(tmp_path / "straight", 20, num_devices=4)
  folder = tmp_path / "checkpoints"
  losses = small_run.run(folder, 3, num_devices=4)

  one, other = answers(finish(start(folder, 20, 1, int(signal.SIGINT), 6)))
  first, received = one
  assert one == other and received == "SIGINT" and 6 <= max(first) < 10
  assert sorted(path.name for path in folder.iterdir()) == ["3", str(max(first))]

  losses |= first | small_run.run(folder, 20, num_devices=2)
  assert [*losses] == [*range(1, 21)]
  np.testing.assert_allclose(
    [*losses.values()], [*straight.values()], rtol=0, atol=1e-5
  )
  assert straight[20] < straight[1]


def test_damage_that_one_process_alone_can_see_is_known_to_all(tmp_path):
  folder = tmp_path / "checkpoints"
  (losses, _), _ = answers(finish(start(folder, 12)))
  files = folder.glob("12/state/ocdbt.process_1/d/*")
  file = max(files, key=lambda file: file.stat().st_size)
  os.truncate(file, file.stat().st_size // 2)

  texts = finish(start(folder, 12))
  for again, _ in answers(texts):
    assert again == {step: losses[step] for step in (11, 12)}
  told = [line for _, err in texts for line in err.splitlines() if "is damaged" in line]
  assert len(told) == 1 and told[0].endswith(": renamed to damaged-12")


def test_where_the_environment_names_others_or_is_wrong():
  assert is_one_of_several(slurm(0, 2)) and is_one_of_several(
    {"OMPI_COMM_WORLD_SIZE": "4"}
  )
  batch_script = {k: v for k, v in slurm(0, 2).items() if "STEP" not in k}
  for alone in ({}, slurm(0, 1), batch_script, {"OMPI_COMM_WORLD_SIZE": "1"}):
    assert not is_one_of_several(alone)
    join_processes(env=alone)
  with pytest.raises(
    InputError, match=r"cannot join the other processes .*'x'.*JAX_PROCESS_ID"
  ):
    join_processes(env=dict(JAX_COORDINATOR_ADDRESS="localhost:1", JAX_PROCESS_ID="x"))
