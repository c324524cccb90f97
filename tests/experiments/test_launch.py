"""Tests the launcher, and its recipes with stand-ins for the clusters' programs."""

import contextlib
import itertools
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
  [
    ("exit 143", 143, 3),
    ("kill -9 $$", 137, 3),
    ("kill -6 $$", 134, 3),
    ("kill -11 $$", 139, 3),
    ("exit 1", 1, 1),
  ],
)
def test_a_killed_command_is_retried_and_a_failed_one_is_not(
  tmp_path, end, status, num_starts
):
  words = ["bash", "-c", f"echo >> {tmp_path}/starts; {end}"]
  assert run_with_retries(words, 1, retries=2) == status
  assert len((tmp_path / "starts").read_text().splitlines()) == num_starts


def test_a_machine_with_python3_alone_can_start_python(tmp_path):
  module = [sys.executable, "-m", "experiments.launch", "--"]
  words = ["python", "-c", "print('started')"]
  answer = subprocess.run(
    [*module, *words],
    cwd=FOLDER.parents[1],
    env={"PATH": str(tmp_path)},
    capture_output=True,
    text=True,
  )
  assert (answer.returncode, answer.stdout) == (0, "started\n"), answer.stderr


def wait_for(folder: pathlib.Path, pattern: str) -> list[pathlib.Path]:
  """Waits until both processes have written a file; returns the files."""
  while len(paths := [*folder.glob(pattern)]) < 2:
    time.sleep(0.05)
  return paths


def is_alive(pid: int) -> bool:
  with contextlib.suppress(OSError):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
  return False


def test_if_one_process_fails_the_others_are_killed(tmp_path):
  script = f"echo $$ > {tmp_path}/$JAX_PROCESS_ID; "
  script += "[ $JAX_PROCESS_ID = 0 ] && exec sleep 100; "
  script += f"while [ ! -s {tmp_path}/0 ]; do sleep 0.05; done; exit 7"
  assert run_with_retries(["bash", "-c", script], 2, retries=0) == 7
  assert not is_alive(int((tmp_path / "0").read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_and_nothing_is_retried(number, tmp_path):
  script = f"trap 'sleep 0.3; touch {tmp_path}/ended$JAX_PROCESS_ID; exit 143' TERM; "
  script += f"touch {tmp_path}/up$JAX_PROCESS_ID; while true; do sleep 0.05; done"

  def terminate():
    wait_for(tmp_path, "up*")
    os.kill(os.getpid(), number)
    if number == signal.SIGHUP:  # the kernel sends one, and the shell another
      time.sleep(0.1)
      os.kill(os.getpid(), number)

  # Under nohup this process ignores SIGHUP, and so would the launcher.
  handler = signal.signal(number, signal.SIG_DFL)
  try:
    thread = threading.Thread(target=terminate)
    thread.start()
    assert run_with_retries(["bash", "-c", script], 2, retries=2) == 143
    thread.join()
    assert len([*tmp_path.glob("ended*")]) == 2
    assert signal.getsignal(number) == signal.SIG_DFL
  finally:
    signal.signal(number, handler)


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_killed_launcher_leaves_no_orphans(tmp_path):
  script = f"touch {tmp_path}/$$; exec sleep 100"
  module = [sys.executable, "-m", "experiments.launch", "--processes=2"]
  words = [*module, "--", "bash", "-c", script]
  launcher = subprocess.Popen(words, cwd=FOLDER.parents[1])
  children = [int(path.name) for path in wait_for(tmp_path, "*")]
  assert all(map(is_alive, children))
  launcher.kill()
  launcher.wait()
  while any(map(is_alive, children)):
    time.sleep(0.05)


# Recipes, with programs that note their arguments
# --------------------------------------------------------------------------------------

ARGUMENTS = ["--config=configs/quickstart.py", "--workdir=runs/with space"]
TRAIN = ["python", "-m", "experiments.train", *ARGUMENTS]


@pytest.fixture
def recipe(tmp_path):
  """Runs a recipe; returns its status and the calls of the programs on its PATH."""
  calls = tmp_path / "calls"
  path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}

  def recipe(name, programs, **env):
    for program, script in programs.items():
      note = f'printf "%s\\0" {program} "$@" >> {calls}; echo >> {calls}\n'
      (tmp_path / program).write_text(f"#!/bin/bash\n{note}{script}\n")
      (tmp_path / program).chmod(0o755)
    words = ["bash", FOLDER / name, *ARGUMENTS]
    options = dict(env=path | env, cwd=FOLDER.parents[1], timeout=60)
    status = subprocess.run(words, **options).returncode
    lines = calls.read_text().split("\0\n")[:-1]
    return status, [line.split("\0") for line in lines]

  return recipe


SLURM = dict(SLURM_JOB_ID="7", SLURM_CPUS_PER_TASK="8")


@pytest.mark.parametrize(
  "ends, restarts, is_requeued",
  [(143, 9, True), (137, 0, True), (137, 3, False), (2, 0, False)],
)
def test_slurm_requeues_what_was_stopped_or_killed(recipe, ends, restarts, is_requeued):
  programs = {"srun": f"exit {ends}", "scontrol": ""}
  env = SLURM | {"SLURM_RESTART_COUNT": str(restarts)}
  status, (first, *others) = recipe("slurm.sbatch", programs, **env)
  assert status == ends
  assert (first[0], first[-5:]) == ("srun", TRAIN)
  assert others == [["scontrol", "requeue", "7"]] * is_requeued


# A queue with a TPU at the second look; the TPU is preempted in the first training.
GCLOUD = """
state=$(dirname "$0")/state
case "$*" in
  *" describe "*) [[ -e $state ]] || { echo NOT_FOUND >&2; exit 1; }
    cat "$state"; ! grep -q WAITING "$state" || echo ACTIVE > "$state" ;;
  *" create "*) echo WAITING_FOR_RESOURCES > "$state" ;;
  *" delete "*) rm "$state" ;;
  *experiments.train*) [[ -e $state.once ]] || { touch "$state.once"; END; } ;;
esac
"""
FIRST = "describe create describe describe scp ssh ssh"


@pytest.mark.parametrize(
  "end, status, verbs",
  [
    ("echo SUSPENDED > $state; exit 255", 0, f"{FIRST} describe delete {FIRST}"),
    ("exit 143", 0, f"{FIRST} describe scp ssh ssh"),
    ("echo SUSPENDED > $state; exit 134", 0, f"{FIRST} describe delete {FIRST}"),
    ("exit 134", 134, f"{FIRST} describe"),
    ("exit 2", 2, FIRST),
  ],
)
def test_a_tpu_vm_is_queued_and_a_preempted_one_replaced(recipe, end, status, verbs):
  programs = {"gcloud": GCLOUD.replace("END", end)}
  ended, calls = recipe("tpu_vm.sh", programs, TPU="t", ZONE="z", WAIT="0")
  assert (ended, " ".join(call[4] for call in calls)) == (status, verbs)
  for call in calls:
    is_on_vm = call[4] in ("scp", "ssh")
    assert call[3] == ("tpu-vm" if is_on_vm else "queued-resources")
    assert "--zone=z" in call
    assert ("--spot" in call) == (call[4] == "create")
    assert ("--worker=all" in call) == is_on_vm
  words = itertools.chain.from_iterable(calls)
  *_, train = (word for word in words if "experiments.train --distributed" in word)
  assert "--workdir=runs/with\\ space" in train
