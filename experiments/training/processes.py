"""Joins the processes of a run, has them agree, and stops them together on a signal."""

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

# Without a heartbeat for so long, the other processes end with status 134.
_HEARTBEAT_SECONDS = 10
# The variables by which JAX finds the tasks of a SLURM step.
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
  """Joins the other processes of this run, if there are any, before JAX is used.

  Processes are found from the environment: a SLURM step (`srun`) or Open MPI with more
  than one task, or

    JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0

  With `distributed`, JAX finds them by itself, as on Cloud TPU and GKE.

  Raises InputError: the other processes cannot be found, or a variable is wrong.
  """
  if not (distributed or is_one_of_several(env)):
    return
  try:
    jax.distributed.initialize(
      num_processes=_number(env, "JAX_NUM_PROCESSES"),
      process_id=_number(env, "JAX_PROCESS_ID"),
      heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
      shutdown_timeout_seconds=3 * _HEARTBEAT_SECONDS,
    )
  except (ValueError, RuntimeError) as error:
    reason = " ".join(str(error).split())[:200]
    raise InputError(
      f"cannot join the other processes ({reason}): look at JAX_COORDINATOR_ADDRESS, "
      "JAX_NUM_PROCESSES and JAX_PROCESS_ID, or at the messages of the cluster"
    ) from error


def _number(env: Mapping[str, str], name: str) -> int | None:
  return int(env[name]) if name in env else None


def is_one_of_several(env: Mapping[str, str]) -> bool:
  """Returns whether the environment names other processes of this run."""
  if "JAX_COORDINATOR_ADDRESS" in env or env.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
    return True
  return env.keys() >= _SLURM and env["SLURM_NTASKS"] != "1"


def is_first() -> bool:
  """Returns whether this is the process that writes and prints."""
  return jax.process_index() == 0


def wait_for_all(name: str) -> None:
  """Waits until every process has called this with the same name."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def check_same(values: Mapping[str, Any]) -> None:
  """Waits for all processes; raises InputError unless these values are the same in each.

  They are values of JSON.
  """
  texts = {name: json.dumps(value) for name, value in values.items()}
  first, *others = [json.loads(text) for text in _gather(json.dumps(texts))]
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
  """Raises an error of this kind in all processes if one has it.

  It waits until all have left the block.
  """
  own = ""
  try:
    yield
  except kind as error:
    own = str(error)
  for message in _gather(own):
    if message:
      raise kind(message)


def any_process(flag: bool) -> bool:
  """Returns whether `flag` is true in any process, once all have called this."""
  return str(True) in _gather(str(flag))


def _gather(text: str) -> list[str]:
  """Returns the text of each process, in order, once all have called this."""
  if jax.process_count() == 1:
    return [text]
  own = text.encode()
  lengths = multihost_utils.process_allgather(np.int32(len(own)))
  padded = own.ljust(int(lengths.max()), b"\0")
  rows = multihost_utils.process_allgather(np.frombuffer(padded, np.uint8))
  return [row.tobytes().rstrip(b"\0").decode() for row in rows]


def print_once(line: str) -> None:
  """Prints a line on stderr, once for all processes."""
  if is_first():
    print(line, file=sys.stderr)


class Stopped(BaseException):
  """The run was stopped by a signal.

  Not an `Exception`, because libraries that catch those would swallow it.
  """


class StopOnSignal:
  """Handles SIGTERM, SIGHUP and SIGINT inside a `with` block.

  A second SIGINT exits at once. A signal raises `Stopped` at once, unless `deferred`
  is true: then `should_stop` returns True from the next call on. Signals that are
  ignored stay ignored, since shells let background jobs ignore SIGINT, and nohup
  SIGHUP.

  In several processes JAX's preemption service receives the signals, and `should_stop`
  returns True from the same call on in all of them; what does not call it goes on.
  """

  def __init__(self):
    self.deferred = False
    self.stopping = False  # known to all processes
    # The signal received; the same in all processes once stopping.
    self.signal = signal.SIGTERM
    self._received = self._is_raised = False
    self._num_calls = 0
    self._exit = contextlib.ExitStack()

  def __enter__(self) -> "StopOnSignal":
    handled = [*signals.STOPPING]
    if jax.process_count() > 1:
      handled.remove(signal.SIGTERM)
    self._exit.enter_context(_answering_interrupts())
    self._exit.enter_context(signals.handle_signals(handled, self._receive))
    return self

  def __exit__(self, *_) -> None:
    self._exit.close()

  def should_stop(self) -> bool:
    """Returns whether any process received a signal; all processes call this together."""
    if jax.process_count() == 1:
      self.stopping |= self._received
    elif not self.stopping:
      self._num_calls += 1
      self.stopping = multihost_utils.reached_preemption_sync_point(self._num_calls)
      if self.stopping:
        received = [int(number) for number in _gather(str(int(self.signal)))]
        # A process that received none has SIGTERM, the largest number.
        self.signal = signal.Signals(min(received))
    return self.stopping

  @contextlib.contextmanager
  def interruptible(self) -> Iterator[None]:
    """Ends the block at once on a signal, if this is the only process.

    Then `stopping` is true. It is meant for work that changes nothing and may take
    long, such as an evaluation.
    """
    before, self.deferred = self.deferred, False
    try:
      yield
      self.deferred = before  # here too: a signal before `finally` would pass through
    except Stopped:
      self.stopping = True
    finally:
      self.deferred = before

  def _receive(self, number: int, frame: types.FrameType | None) -> None:
    # A launcher passes Ctrl-C on as SIGTERM, and a shutdown may send a signal twice.
    is_first = not self._received
    if is_first:
      self._received, self.signal = True, signal.Signals(number)
    if jax.process_count() > 1:
      if is_first:
        signal.raise_signal(signal.SIGTERM)  # JAX's service tells the other processes
      return
    # Where an exception would be dropped, the next signal raises.
    is_dropped = self.deferred or signals.drops_exceptions(frame)
    if not self._is_raised and not is_dropped:
      self._is_raised = True
      raise Stopped


@contextlib.contextmanager
def _answering_interrupts() -> Iterator[None]:
  """Tells of a first SIGINT at once, and exits at once after a second.

  Python calls handlers in the main thread, and not before a compilation there ends. The
  numbers of signals it writes to a pipe at once.
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
