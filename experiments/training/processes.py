"""Joins the processes of a run, compares them, and stops them together on a signal."""

import contextlib
import json
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments import signals
from experiments.errors import InputError

# An error in one process ends the others after this time, with status 134.
_SHUTDOWN_SECONDS = 30
# JAX finds the tasks of a SLURM step by these variables.
_SLURM = {
  "SLURM_JOB_ID",
  "SLURM_STEP_NODELIST",
  "SLURM_NTASKS",
  "SLURM_PROCID",
  "SLURM_LOCALID",
}


def join_processes(
  distributed: bool = False, env: Mapping[str, str] = os.environ
) -> None:
  """Joins the other processes of this run, if there are any; call it before using JAX.

  Three environment variables say how to find them, for example:

    JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0

  They are not needed under SLURM (`srun`) or Open MPI with more than one task. With
  `distributed`, JAX finds the other processes in further ways, as on Cloud TPU and GKE.

  Raises InputError if the other processes cannot be found, or if a variable is wrong.
  """
  if not (distributed or is_one_of_several(env)):
    return
  try:
    jax.distributed.initialize(
      num_processes=_read_number(env, "JAX_NUM_PROCESSES"),
      process_id=_read_number(env, "JAX_PROCESS_ID"),
      shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )
  except (ValueError, RuntimeError) as error:
    reason = " ".join(str(error).split())[:200]
    raise InputError(
      f"cannot join the other processes ({reason}): look at JAX_COORDINATOR_ADDRESS, "
      "JAX_NUM_PROCESSES and JAX_PROCESS_ID, or at the messages of the cluster"
    ) from error
  if jax.default_backend() == "gpu":
    # The first process alone writes the cache of compiled programs. On GPUs, processes
    # that compile tune kernels together, and would wait for one that reads the cache.
    jax.config.update("jax_enable_compilation_cache", False)


def _read_number(env: Mapping[str, str], name: str) -> int | None:
  return int(env[name]) if name in env else None


def is_one_of_several(env: Mapping[str, str]) -> bool:
  """Checks whether the environment names other processes of this run."""
  if "JAX_COORDINATOR_ADDRESS" in env or env.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
    return True
  return env.keys() >= _SLURM and env["SLURM_NTASKS"] != "1"


def is_first() -> bool:
  """Checks whether this is the first process, which alone writes and prints."""
  return jax.process_index() == 0


def wait_for_all(name: str) -> None:
  """Waits until all processes have called this with the same name."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def check_same(values: Mapping[str, Any]) -> None:
  """Raises InputError unless all processes call this with the same values.

  Waits for all of them. Values must be valid in JSON.
  """
  texts = {name: json.dumps(value) for name, value in values.items()}
  first, *others = map(json.loads, _gather(json.dumps(texts)))
  for process, other in enumerate(others, 1):
    for name in first | other:
      ours, theirs = first.get(name, "absent"), other.get(name, "absent")
      if ours != theirs:
        raise InputError(
          f"{name} is {ours} in process 0 and {theirs} in process {process}: "
          "start all processes with the same command, code and files"
        )


@contextlib.contextmanager
def fail_together(kind: type[Exception] = InputError) -> Iterator[None]:
  """Raises an error of `kind` in all processes if the block raises one in any of them.

  Waits until all processes have left the block.
  """
  own_message = ""
  try:
    yield
  except kind as error:
    own_message = str(error)
  for message in _gather(own_message):
    if message:
      raise kind(message)


def any_process(flag: bool) -> bool:
  """Checks whether `flag` is true in any process; all of them must call this."""
  return str(True) in _gather(str(flag))


def _gather(text: str) -> list[str]:
  """Gathers a text from each process, in order; all of them must call this."""
  if jax.process_count() == 1:
    return [text]
  encoded = text.encode()
  lengths = multihost_utils.process_allgather(np.int32(len(encoded)))
  padded = encoded.ljust(int(lengths.max()), b"\0")
  rows = multihost_utils.process_allgather(np.frombuffer(padded, np.uint8))
  return [row.tobytes().rstrip(b"\0").decode() for row in rows]


def print_once(line: str) -> None:
  """Prints a line on stderr in the first process only."""
  if is_first():
    print(line, file=sys.stderr)


class Stopped(BaseException):
  """Ends a run after a signal.

  It is not an `Exception`, because libraries that catch all exceptions would drop it.
  """


class StopOnSignal:
  """Handles SIGTERM, SIGHUP and SIGINT inside a `with` block.

  A signal raises `Stopped` at once. If `deferred` is true, it makes `should_stop`
  return True instead. A second SIGINT exits at once. Ignored signals stay ignored:
  shells make background jobs ignore SIGINT, and nohup ignores SIGHUP.

  In several processes, JAX's preemption service receives the signals. Then
  `should_stop` returns True in all processes, from the same call on. Work that does not
  call it goes on.
  """

  def __init__(self):
    self.deferred = False
    self.stopping = False  # the same in all processes
    # The signal that was received; the same in all processes once `stopping`.
    self.signal = signal.SIGTERM
    self._received = self._is_raised = False
    self._num_calls = 0
    self._exit = contextlib.ExitStack()

  def __enter__(self) -> "StopOnSignal":
    handled = [*signals.STOPPING]
    if jax.process_count() > 1:
      handled.remove(signal.SIGTERM)
    self._exit.enter_context(_watch_interrupts())
    self._exit.enter_context(signals.handle_signals(handled, self._receive))
    return self

  def __exit__(self, *_) -> None:
    self._exit.close()

  def should_stop(self) -> bool:
    """Checks whether any process received a signal; all of them must call this."""
    if jax.process_count() == 1:
      self.stopping |= self._received
    elif not self.stopping:
      self._num_calls += 1
      self.stopping = multihost_utils.reached_preemption_sync_point(self._num_calls)
      if self.stopping:
        # Processes without a signal have SIGTERM, which has the largest number.
        received = map(int, _gather(str(int(self.signal))))
        self.signal = signal.Signals(min(received))
    return self.stopping

  @contextlib.contextmanager
  def interruptible(self) -> Iterator[None]:
    """Lets a signal end the block immediately; `stopping` is then true.

    With several processes, a signal does not end the block. Use it for work that may
    take long and changes nothing, such as an evaluation.
    """
    before, self.deferred = self.deferred, False
    try:
      yield
      self.deferred = before  # here too: a signal before `finally` would escape
    except Stopped:
      self.stopping = True
    finally:
      self.deferred = before

  def _receive(self, number: int, frame: types.FrameType | None) -> None:
    # Signals may come twice: a launcher also sends SIGTERM after Ctrl-C.
    is_first = not self._received
    if is_first:
      self._received, self.signal = True, signal.Signals(number)
    if jax.process_count() > 1:
      if is_first:
        signal.raise_signal(signal.SIGTERM)  # JAX's service tells the other processes
      return
    # If an exception would be dropped here, the next signal raises it.
    is_dropped = self.deferred or signals.drops_exceptions(frame)
    if not self._is_raised and not is_dropped:
      self._is_raised = True
      raise Stopped


@contextlib.contextmanager
def _watch_interrupts() -> Iterator[None]:
  """Prints a line at the first SIGINT, and exits at the second, both immediately.

  A signal handler would be too late. Python calls it in the main thread, and not before
  a compilation there has ended. But Python also writes the number of each signal to a
  pipe, and does that immediately. A thread reads the pipe.
  """
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  thread = threading.Thread(target=_answer_interrupts, args=[reader], daemon=True)
  thread.start()
  before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
  try:
    yield
  finally:
    signal.set_wakeup_fd(before)
    os.close(writer)  # ends the thread
    thread.join()


def _answer_interrupts(reader: int) -> None:
  is_told = False
  with open(reader, "rb", buffering=0) as numbers:
    for number in iter(lambda: numbers.read(1), b""):
      if ord(number) != signal.SIGINT:
        continue
      if is_told:
        os._exit(128 + signal.SIGINT)
      is_told = True
      print_once("stopping after this step or compilation; Ctrl-C again exits at once")
