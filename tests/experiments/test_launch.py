"""Tests the launcher, and its recipes with stand-ins for the clusters' programs."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from experiments.launch.__main__ import run_with_retries

FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "launch"


@pytest.mark.parametrize(
  "end, status, num_starts",
  [("exit 143", 143, 3), ("kill -9 $$", 137, 3), ("kill -6 $$", 134, 3), ("exit 1", 1, 1)],
)
def test_a_killed_command_is_retried_and_a_failed_one_is_not(tmp_path, end, status, num_starts):
  words = ["bash", "-c", f"echo >> {tmp_path}/starts; {end}"]
  assert run_with_retries(words, 1, retries=2) == status
  assert len((tmp_path / "starts").read_text().splitlines()) == num_starts


def wait_until(condition) -> None:
  while not condition():
    time.sleep(0.05)


def is_alive(pid: int) -> bool:
  status = pathlib.Path(f"/proc/{pid}/stat")
  return status.exists() and status.read_text().split()[2] != "Z"


def test_if_one_process_fails_the_others_are_killed(tmp_path):
  script = f"echo $$ > {tmp_path}/$JAX_PROCESS_ID; [ $JAX_PROCESS_ID = 0 ] && exec sleep 100"
  script += f"; while [ ! -s {tmp_path}/0 ]; do sleep 0.05; done; exit 7"
  assert run_with_retries(["bash", "-c", script], 2, retries=0) == 7
  assert not is_alive(int((tmp_path / "0").read_text()))


def test_sigterm_is_passed_on_and_nothing_is_retried(tmp_path):
  script = f"trap 'touch {tmp_path}/ended$JAX_PROCESS_ID; exit 143' TERM; "
  script += f"touch {tmp_path}/up$JAX_PROCESS_ID; while true; do sleep 0.05; done"

  def terminate():
    wait_until(lambda: len([*tmp_path.glob("up*")]) == 2)
    os.kill(os.getpid(), signal.SIGTERM)

  handler = signal.getsignal(signal.SIGTERM)
  thread = threading.Thread(target=terminate)
  thread.start()
  assert run_with_retries(["bash", "-c", script], 2, retries=2) == 143
  thread.join()
  assert len([*tmp_path.glob("ended*")]) == 2
  assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_killed_launcher_leaves_no_orphans(tmp_path):
  script = f"touch {tmp_path}/$$; exec sleep 100"
  words = [sys.executable, "-m", "experiments.launch", "--processes=2", "--", "bash", "-c", script]
  launcher = subprocess.Popen(words, cwd=FOLDER.parents[1])
  wait_until(lambda: len([*tmp_path.iterdir()]) == 2)
  children = [int(path.name) for path in tmp_path.iterdir()]
  assert all(map(is_alive, children))
  launcher.kill()
  launcher.wait()
  wait_until(lambda: not any(map(is_alive, children)))


@pytest.mark.parametrize(
  "recipe, program",
  [
    ("gpus.sh", "python"),
    ("slurm.sbatch", "python"),
    ("tpu_vm.sh", "gcloud"),
    ("gke_xpk.sh", "xpk"),
  ],
)
def test_a_recipe_runs_the_training_with_its_arguments(recipe, program, tmp_path):
  (tmp_path / program).write_text('#!/bin/bash\nprintf "%s\\n" "$0" "$@"\n')
  (tmp_path / program).chmod(0o755)
  env = dict.fromkeys(("TPU", "ZONE", "CLUSTER", "TPU_TYPE", "BASE_IMAGE"), "given")
  env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
  words = ["bash", FOLDER / recipe, "--config=configs/quickstart.py", "--workdir=runs/with space"]
  output = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
  assert output.startswith(f"{tmp_path}/{program}\n") and "experiments.train" in output
  workdir = "runs/with space" if program == "python" else "runs/with\\ space"
  assert f"--workdir={workdir}" in output
