"""The launcher starts, restarts and ends processes; its recipes can be pasted."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from experiments.launch.__main__ import environments, run_with_retries

FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "launch"
RECIPES = sorted([*FOLDER.glob("*.sh"), *FOLDER.glob("*.sbatch")])


def bash(script: str) -> list[str]:
  return ["bash", "-c", script]


@pytest.mark.parametrize("status", ["exit 134", "exit 137", "exit 143", "kill -9 $$", "kill -6 $$"])
def test_a_killed_command_is_started_again_up_to_a_limit(status, tmp_path, capfd):
  count = f"echo >> {tmp_path}/starts"
  assert run_with_retries(bash(f"{count}; {status}"), 1, retries=2) in (134, 137, 143)
  assert len((tmp_path / "starts").read_text().splitlines()) == 3
  assert "retry 2 of 2" in capfd.readouterr().err


def test_one_that_recovers_ends_well(tmp_path):
  script = f"test -e {tmp_path}/once && exit 0; touch {tmp_path}/once; kill -9 $$"
  assert run_with_retries(bash(script), 1, retries=1) == 0


@pytest.mark.parametrize("status", [0, 1, 2])
def test_what_ended_by_itself_is_not_started_again(status, tmp_path):
  script = f"echo >> {tmp_path}/starts; exit {status}"
  assert run_with_retries(bash(script), 1, retries=2) == status
  assert len((tmp_path / "starts").read_text().splitlines()) == 1


def test_when_one_of_several_fails_the_others_are_killed(tmp_path):
  """The mistake of one counts more than that others died of it."""
  script = f"echo $$ > {tmp_path}/$JAX_PROCESS_ID; [ $JAX_PROCESS_ID = 0 ] && exec sleep 100"
  script += f"; while [ ! -s {tmp_path}/0 ]; do sleep 0.05; done; exit $((135 - JAX_PROCESS_ID))"
  assert run_with_retries(bash(script), 2, retries=0) == 134
  assert not is_alive(int((tmp_path / "0").read_text()))


def is_alive(pid: int) -> bool:
  status = pathlib.Path(f"/proc/{pid}/stat")
  return status.exists() and status.read_text().split()[2] != "Z"


def test_each_of_several_is_told_who_it_is():
  first, second = environments(2, dict(HOME="/"))
  assert (first["JAX_PROCESS_ID"], second["JAX_PROCESS_ID"]) == ("0", "1")
  assert first["JAX_COORDINATOR_ADDRESS"] == second["JAX_COORDINATOR_ADDRESS"]
  assert first["JAX_NUM_PROCESSES"] == "2" and first["HOME"] == "/"


def test_sigterm_is_passed_on_and_nothing_is_started_again(tmp_path):
  script = f"trap 'echo >> {tmp_path}/heard; exit $JAX_PROCESS_ID' TERM; touch {tmp_path}/up"
  script += "$JAX_PROCESS_ID; while true; do sleep 0.05; done"
  handler = signal.getsignal(signal.SIGTERM)

  def terminate():
    while not all((tmp_path / f"up{i}").exists() for i in (0, 1)):
      time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)

  thread = threading.Thread(target=terminate)
  thread.start()
  assert run_with_retries(bash(script), 2, retries=2) == 1
  thread.join()
  assert len((tmp_path / "heard").read_text().splitlines()) == 2
  assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills the children of the dead")
def test_a_killed_launcher_leaves_no_orphan(tmp_path):
  script = f"echo $$ > {tmp_path}/$JAX_PROCESS_ID.new; mv {tmp_path}/$JAX_PROCESS_ID.new "
  script += f"{tmp_path}/$JAX_PROCESS_ID; exec sleep 100"
  command = [sys.executable, "-m", "experiments.launch", "--processes=2", "--", *bash(script)]
  launcher = subprocess.Popen(command, cwd=FOLDER.parents[1])
  files = [tmp_path / "0", tmp_path / "1"]
  while not all(file.exists() for file in files):
    assert launcher.poll() is None
    time.sleep(0.05)
  children = [int(file.read_text()) for file in files]
  assert all(map(is_alive, children))
  launcher.kill()
  launcher.wait()
  deadline = time.monotonic() + 10
  while any(map(is_alive, children)) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not any(map(is_alive, children))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_recipe_runs_the_training_with_what_it_is_given(recipe, tmp_path):
  """Each ends in one program that is not here: a stand-in writes what it was called with."""
  subprocess.run(["bash", "-n", recipe], check=True)
  for program in ("gcloud", "xpk", "python"):
    (tmp_path / program).write_text('#!/bin/bash\nprintf "%s\\n" "$0" "$@"\n')
    (tmp_path / program).chmod(0o755)
  names = ("TPU", "ZONE", "CLUSTER", "TPU_TYPE", "BASE_IMAGE")
  env = dict.fromkeys(names, "given") | dict(PATH=f"{tmp_path}:{os.environ['PATH']}")
  arguments = ["--config=configs/quickstart.py", "--workdir=runs/with space"]
  called = subprocess.run(
    ["bash", recipe, *arguments], env=env, capture_output=True, text=True, check=True
  ).stdout
  program = {"tpu_vm.sh": "gcloud", "gke_xpk.sh": "xpk"}.get(recipe.name, "python")
  assert called.startswith(f"{tmp_path}/{program}\n") and "experiments.train" in called
  quoted = arguments if program == "python" else [arguments[0], "--workdir=runs/with\\ space"]
  assert all(word in called for word in quoted)
  if program != "python":
    assert "--distributed" in called and called.count("given") >= 2
  without = subprocess.run(["bash", recipe], env=dict(PATH=env["PATH"]), capture_output=True)
  assert (without.returncode == 0) == (program == "python")


def test_there_is_a_recipe_for_each_place():
  names = {path.name for path in RECIPES}
  assert names == {"tpu_vm.sh", "gke_xpk.sh", "slurm.sbatch", "gpus.sh"}
