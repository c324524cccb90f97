"""Tests the launcher, and its recipes with stand-ins for the clusters' programs."""

import contextlib
import os
import pathlib
import re
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
    ("exit 1", 1, 1),
  ],
)
def test_a_killed_command_is_retried_and_a_failed_one_is_not(
  tmp_path, end, status, num_starts
):
  words = ["bash", "-c", f"echo >> {tmp_path}/starts; {end}"]
  assert run_with_retries(words, 1, retries=2) == status
  assert len((tmp_path / "starts").read_text().splitlines()) == num_starts


def wait_until(condition) -> None:
  while not condition():
    time.sleep(0.05)


def is_alive(pid: int) -> bool:
  with contextlib.suppress(OSError):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
  return False


def test_if_one_process_fails_the_others_are_killed(tmp_path):
  script = (
    f"echo $$ > {tmp_path}/$JAX_PROCESS_ID; [ $JAX_PROCESS_ID = 0 ] && exec sleep 100"
  )
  script += f"; while [ ! -s {tmp_path}/0 ]; do sleep 0.05; done; exit 7"
  assert run_with_retries(["bash", "-c", script], 2, retries=0) == 7
  assert not is_alive(int((tmp_path / "0").read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_and_nothing_is_retried(number, tmp_path):
  script = f"trap 'sleep 0.3; touch {tmp_path}/ended$JAX_PROCESS_ID; exit 143' TERM; "
  script += f"touch {tmp_path}/up$JAX_PROCESS_ID; while true; do sleep 0.05; done"

  def terminate():
    wait_until(lambda: len([*tmp_path.glob("up*")]) == 2)
    os.kill(os.getpid(), number)
    if number == signal.SIGHUP:  # the kernel sends one, and the shell another
      time.sleep(0.1)
      os.kill(os.getpid(), number)

  handler = signal.getsignal(number)
  thread = threading.Thread(target=terminate)
  thread.start()
  assert run_with_retries(["bash", "-c", script], 2, retries=2) == 143
  thread.join()
  assert len([*tmp_path.glob("ended*")]) == 2
  assert signal.getsignal(number) == handler


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_killed_launcher_leaves_no_orphans(tmp_path):
  script = f"touch {tmp_path}/$$; exec sleep 100"
  words = [
    sys.executable,
    "-m",
    "experiments.launch",
    "--processes=2",
    "--",
    "bash",
    "-c",
    script,
  ]
  launcher = subprocess.Popen(words, cwd=FOLDER.parents[1])
  wait_until(lambda: len([*tmp_path.iterdir()]) == 2)
  children = [int(path.name) for path in tmp_path.iterdir()]
  assert all(map(is_alive, children))
  launcher.kill()
  launcher.wait()
  wait_until(lambda: not any(map(is_alive, children)))


# --- recipes, with programs that note their arguments
# --------------------------------------------

ARGUMENTS = ["--config=configs/quickstart.py", "--workdir=runs/with space"]


@pytest.fixture
def recipe(tmp_path):
  """Returns a function that runs a recipe and returns the calls of the programs on its PATH."""

  def run(name, programs, **env):
    for program, script in programs.items():
      note = (
        f'printf "%s\\0" {program} "$@" >> {tmp_path}/calls; echo >> {tmp_path}/calls\n'
      )
      (tmp_path / program).write_text(f"#!/bin/bash\n{note}{script}\n")
      (tmp_path / program).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)} | env
    words = ["bash", FOLDER / name, *ARGUMENTS]
    status = subprocess.run(
      words, env=env, cwd=FOLDER.parents[1], timeout=60
    ).returncode
    calls = (tmp_path / "calls").read_text().split("\0\n")[:-1]
    return status, [call.split("\0") for call in calls]

  return run


def options(words):
  found = (word[2:].partition("=") for word in words if word.startswith("--"))
  return {name: value for name, _, value in found}


def test_gpus_and_xpk_get_their_flags_and_the_command(recipe):
  status, (call,) = recipe("gpus.sh", dict(python=""), PROCESSES="8")
  train = ["--", "python", "-m", "experiments.train", *ARGUMENTS]
  wanted = [
    "python",
    "-m",
    "experiments.launch",
    "--processes=8",
    "--retries=3",
    *train,
  ]
  assert (status, call) == (0, wanted)
  given = dict(CLUSTER="c", ZONE="z", TPU_TYPE="v5litepod-16")
  status, (_, call) = recipe("gke_xpk.sh", dict(xpk=""), **given)
  assert (status, call[:4]) == (0, ["xpk", "workload", "create", "--cluster=c"])
  flags = options(call)
  assert re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", flags["workload"])
  assert "exec python -m experiments.train --distributed --config=" in flags["command"]


SLURM = dict(SLURM_JOB_ID="7", SLURM_CPUS_PER_TASK="8")


@pytest.mark.parametrize(
  "ends, restarts, is_requeued",
  [(143, 9, True), (137, 0, True), (137, 3, False), (2, 0, False)],
)
def test_slurm_requeues_what_was_stopped_or_killed(recipe, ends, restarts, is_requeued):
  programs = dict(srun=f"exit {ends}", scontrol="")
  status, calls = recipe(
    "slurm.sbatch", programs, **SLURM, SLURM_RESTART_COUNT=str(restarts)
  )
  assert calls[0][0] == "srun"
  assert calls[0][-5:] == ["python", "-m", "experiments.train", *ARGUMENTS]
  assert (status, calls[1:]) == (
    ends,
    [["scontrol", "requeue", "7"]] if is_requeued else [],
  )


# A queue that has a TPU at the second look, and a TPU that is preempted during the
# first training.
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
    ("exit 2", 2, FIRST),
  ],
)
def test_a_tpu_vm_is_queued_and_a_preempted_one_replaced(recipe, end, status, verbs):
  programs = dict(gcloud=GCLOUD.replace("END", end))
  found, calls = recipe("tpu_vm.sh", programs, TPU="t", ZONE="z", WAIT="0")
  assert (found, " ".join(call[4] for call in calls)) == (status, verbs)
  for call in calls:
    group = "tpu-vm" if call[4] in ("scp", "ssh") else "queued-resources"
    assert call[:4] == ["gcloud", "compute", "tpus", group] and "--zone=z" in call
    assert ("--spot" in call) == (call[4] == "create")
    assert ("--worker=all" in call) == (group == "tpu-vm")
  install, train = [options(call)["command"] for call in calls if call[4] == "ssh"][-2:]
  assert (
    "uv venv --allow-existing --python=3.12" in install
    and ".[tpu,experiments]" in install
  )
  assert (
    "experiments.train --distributed" in train
    and "--workdir=runs/with\\ space" in train
  )


@pytest.mark.parametrize("verb, num_calls", [("describe", 1), ("create", 2)])
def test_a_wrong_zone_quota_or_login_ends_the_recipe(recipe, verb, num_calls):
  refuse = f'case "$*" in *" {verb} "*) echo "login expired" >&2; exit 1 ;; esac\n'
  status, calls = recipe(
    "tpu_vm.sh", dict(gcloud=refuse + GCLOUD), TPU="t", ZONE="z", SPOT="no"
  )
  assert (status, len(calls)) == (1, num_calls)
  assert not any("--spot" in call for call in calls)
