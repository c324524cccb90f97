r"""Runs a command in one or several processes on this machine, with retries.

  python -m experiments.launch --processes=2 -- python -m experiments.train --config=...

A single process can use all GPUs, and is simpler; several may load data faster. With
--processes above 1, each process gets the coordinator's address, its number, and one
GPU. If one fails, the others are killed. If the command exits with status 134, 137 or
143 (aborted, killed, terminated), it starts again, up to --retries times. A training
command then resumes from its last checkpoint.

SIGTERM, Ctrl-C and the SIGHUP of a closed terminal reach the processes as SIGTERM, and
end the run. A second SIGTERM or Ctrl-C ends it at once. If the launcher itself is
killed, its processes are killed too, where Linux has setpriv.

experiments/launch/ has scripts for Cloud TPU, GKE and SLURM.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from experiments import command, signals
from experiments.errors import InputError
from experiments.launch import end_with_parent

FLAGS = dict(
  processes=command.Flag(
    1, "number of processes; more than one have one GPU each", least=1
  ),
  retries=command.Flag(3, "how often the command is started again", least=0),
)

# Killed, stopped, or ended because another process was. libtpu turns 134 into 139.
_RETRIED = (134, 137, 139, 143)


def make_main(words: Sequence[str]) -> Callable[..., None]:
  """Makes the main function of the launcher, which starts another command.

  `words` are the words of that command: all that follows `--`.
  """

  def main(processes: int, retries: int) -> None:
    program, *arguments = words or [""]
    if program == "python":  # PATH may have python3 only
      program = sys.executable
    if not shutil.which(program):
      raise InputError(
        "no program: give one after --, such as -- python -m experiments.train ..."
      )
    sys.exit(run_with_retries([program, *arguments], processes, retries))

  return main


def run_with_retries(words: Sequence[str], processes: int, retries: int) -> int:
  """Runs a command, retries it if it was killed, and returns its last status."""
  received = []

  def note(number: int, _) -> None:
    if received and number != signal.SIGHUP:  # a closed terminal may send two
      raise KeyboardInterrupt
    received.append(number)

  with signals.handle_signals(signals.STOPPING, note):
    for retry in range(1, retries + 2):
      status = _run(words, processes, received)
      if status not in _RETRIED or received or retry > retries:
        break
      print(f"exit status {status}: retry {retry} of {retries}", file=sys.stderr)
    return status


def _run(words: Sequence[str], processes: int, received: Sequence[int]) -> int:
  """Runs the command once; returns the status of a failed process, or 0."""
  running = []
  try:
    for env in environments(processes, os.environ):
      running.append(subprocess.Popen([*end_with_parent(), *words], env=env))
    while _any_runs(running) and not received and not _status(running):
      time.sleep(0.1)
    if received:
      _terminate(running)
    return _status(running)
  finally:
    for process in running:
      process.kill()
      process.wait()


def _terminate(processes: Sequence[subprocess.Popen]) -> None:
  """Sends SIGTERM to all processes; waits until all have ended, or one has failed."""
  saved = {0, *(128 + number for number in signals.STOPPING)}
  for process in processes:
    process.terminate()
  while _any_runs(processes) and _status(processes) in saved:
    time.sleep(0.1)


def _any_runs(processes: Sequence[subprocess.Popen]) -> bool:
  return any(process.poll() is None for process in processes)


def _status(processes: Sequence[subprocess.Popen]) -> int:
  """Returns 0 if no process has failed, and otherwise the status of one that has.

  If several have failed, a status that is not retried takes precedence.
  """
  failed = []
  for process in processes:
    code = process.poll()
    if code:
      failed.append(code if code > 0 else 128 - code)
  final = [code for code in failed if code not in _RETRIED]
  return [*final, *failed, 0][0]


def environments(processes: int, env: Mapping[str, str]) -> list[dict[str, str]]:
  """Returns the environment variables of each process.

  If there are several, they tell JAX the coordinator's address, the number of the
  process, and its GPU.
  """
  if processes == 1:
    return [dict(env)]
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    port = listener.getsockname()[1]
  environments = []
  for number in range(processes):
    names = dict(
      JAX_COORDINATOR_ADDRESS=f"localhost:{port}",
      JAX_NUM_PROCESSES=str(processes),
      JAX_PROCESS_ID=str(number),
      JAX_LOCAL_DEVICE_IDS=str(number),
    )
    environments.append({**env, **names})
  return environments


if __name__ == "__main__":
  _at = [*sys.argv, "--"].index("--")
  command.run(make_main(sys.argv[_at + 1 :]), FLAGS, sys.argv[1:_at])
