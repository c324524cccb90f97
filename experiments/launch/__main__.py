r"""Runs a command in several processes of this machine, and again when it was killed.

  python -m experiments.launch --processes=2 -- python -m experiments.train --config=...
  python -m experiments.launch --retries=5 -- srun python -m experiments.train --config=...

With --processes above 1, each is told of the others and has one of the machine's GPUs. One process
uses all GPUs as well, and is simpler; several feed them faster. When one fails the others are
killed. A command that was killed, with status 134, 137 or 143, is started again, --retries times at
most: a training goes on where it last saved. SIGTERM is passed on, and ends it all; nothing is left
running if this process is killed itself.

Recipes for Cloud TPU, GKE and SLURM are in experiments/launch/.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from experiments import command
from experiments.launch.children import dying_with_this_process
from relpos_jax.errors import InputError

FLAGS = dict(
  processes=command.Flag(1, "how many; each has one GPU, if there is more than one process"),
  retries=command.Flag(3, "how often the command is started again"),
)

RESTARTABLE = (134, 137, 143)  # aborted since another process died, killed, terminated
_POLL_SECONDS, _SECONDS_TO_SAVE = 0.1, 30.0


def make_main(words: Sequence[str]) -> Callable[..., None]:
  """The command of these flags, for the words after `--`."""

  def main(processes: int, retries: int) -> None:
    if processes < 1 or retries < 0:
      raise InputError("--processes must be at least 1 and --retries at least 0")
    if not words or not shutil.which(words[0]):
      what = f"no program {words[0]!r}" if words else "no command"
      raise InputError(f"{what}: give one after --, such as -- python -m experiments.train ...")
    program = sys.executable if words[0] == "python" else words[0]
    sys.exit(run_again_and_again([program, *words[1:]], processes, retries))

  return main


def run_again_and_again(words: Sequence[str], processes: int, retries: int) -> int:
  """Runs a command in so many processes, again where it was killed; returns its exit status."""
  with _Signals() as signals:
    for retry in range(retries + 1):
      status = _run(words, processes, signals)
      if status not in RESTARTABLE or signals.heard or retry == retries:
        return status
      print(f"exit status {status}: retry {retry + 1} of {retries}", file=sys.stderr)
  raise AssertionError("unreachable")


class _Signals:
  """Notes SIGTERM or SIGINT instead of ending; another one ends."""

  def __init__(self):
    self.heard: int | None = None

  def __enter__(self) -> "_Signals":
    names = (signal.SIGTERM, signal.SIGINT)
    self._before = {name: signal.signal(name, self._note) for name in names}
    return self

  def __exit__(self, *_) -> None:
    for name, handler in self._before.items():
      signal.signal(name, handler)

  def _note(self, number: int, _) -> None:
    if self.heard:
      raise KeyboardInterrupt
    self.heard = number


def _run(words: Sequence[str], processes: int, signals: _Signals) -> int:
  """Runs the command in all processes; the exit status of the first that failed, or 0."""
  with contextlib.ExitStack() as stack:
    running = [
      stack.enter_context(_process(words, env)) for env in environments(processes, os.environ)
    ]
    deadline = None
    while any(process.poll() is None for process in running):
      if signals.heard and deadline is None:
        deadline = time.monotonic() + _SECONDS_TO_SAVE
        for process in running:
          process.terminate()
      if _status(running) if deadline is None else time.monotonic() > deadline:
        break  # and the others are killed
      time.sleep(_POLL_SECONDS)
    return _status(running) or (0 if all(p.poll() == 0 for p in running) else 137)


def _status(processes: Sequence[subprocess.Popen]) -> int:
  """That of one that failed: rather one that is not to be started again. 0: none has."""
  failed = [code if code > 0 else 128 - code for p in processes if (code := p.poll())]
  return min(failed, key=lambda code: code in RESTARTABLE, default=0)


def environments(processes: int, env: Mapping[str, str]) -> list[dict[str, str]]:
  """What each process finds in its environment: where the first is, and which one it is.

  >>> environments(1, {"HOME": "/"})
  [{'HOME': '/'}]
  """
  if processes == 1:
    return [dict(env)]
  port = _free_port()
  return [
    {
      **env,
      "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
      "JAX_NUM_PROCESSES": str(processes),
      "JAX_PROCESS_ID": str(i),
      "JAX_LOCAL_DEVICE_IDS": str(i),
    }
    for i in range(processes)
  ]


def _free_port() -> int:
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    return listener.getsockname()[1]


@contextlib.contextmanager
def _process(words: Sequence[str], env: Mapping[str, str]) -> Iterator[subprocess.Popen]:
  """Runs until it ends; killed where the context ends, or this process does."""
  process = subprocess.Popen([*dying_with_this_process(), *words], env=env)
  try:
    yield process
  finally:
    process.kill()
    process.wait()


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """What is before and after `--`.

  >>> split(["--processes=2", "--", "python", "--", "x"])
  (['--processes=2'], ['python', '--', 'x'])
  """
  at = [*argv, "--"].index("--")
  return [*argv[:at]], [*argv[at + 1 :]]


if __name__ == "__main__":
  _flags, _words = split(sys.argv[1:])
  command.run(make_main(_words), FLAGS, _flags)
