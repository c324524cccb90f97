"""One run in several processes: how they find each other, decide and speak."""

import contextlib
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from relpos_jax.errors import InputError

_SECONDS_TILL_DEAD = 10  # without a sign of life; then the others end, with status 134
_LINE_BYTES = 512  # of a line that travels between processes; what is longer is cut
_SLURM = ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID", "LOCALID")  # as JAX looks for it


def join_processes(distributed: bool = False, env: Mapping[str, str] = os.environ) -> None:
  """Joins the other processes of this run, if there are any; before JAX is used.

  They are there where the environment says so: SLURM's of a step (`srun`) and Open MPI's, of more
  than one task, or

    JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0

  Args:
    distributed: they are there at any rate, and JAX finds them: on Cloud TPU and GKE.
    env: the environment.

  Raises:
    InputError: they cannot be found, or the variables are wrong.
  """
  if not (distributed or is_one_of_several(env)):
    return
  # SIGTERM is `Stop`'s, and its handler can be one of Python's alone.
  jax.config.update("jax_enable_preemption_service", False)
  try:
    jax.distributed.initialize(
      num_processes=_number("JAX_NUM_PROCESSES", env),
      process_id=_number("JAX_PROCESS_ID", env),
      heartbeat_timeout_seconds=_SECONDS_TILL_DEAD,
      shutdown_timeout_seconds=3 * _SECONDS_TILL_DEAD,
    )
  except (ValueError, RuntimeError) as error:
    reason = " ".join(str(error).split())[:200]
    raise InputError(
      f"cannot join the other processes ({reason}): look at JAX_COORDINATOR_ADDRESS, "
      "JAX_NUM_PROCESSES and JAX_PROCESS_ID, or at what the cluster says"
    ) from error


def is_one_of_several(env: Mapping[str, str]) -> bool:
  """Whether the environment says that other processes take part.

  >>> is_one_of_several({})
  False
  >>> is_one_of_several({"JAX_COORDINATOR_ADDRESS": "localhost:1234"})
  True
  """
  slurm = all(f"SLURM_{name}" in env for name in _SLURM) and env["SLURM_NTASKS"]
  sizes = (slurm, env.get("OMPI_COMM_WORLD_SIZE"))
  return "JAX_COORDINATOR_ADDRESS" in env or any(size not in (False, None, "1") for size in sizes)


def _number(name: str, env: Mapping[str, str]) -> int | None:
  try:
    return int(env[name]) if name in env else None
  except ValueError as error:
    raise InputError(f"{name} is {env[name]!r} in the environment: give a number") from error


def is_first() -> bool:
  """Whether this is the process that writes and prints."""
  return jax.process_index() == 0


def wait_for_all(name: str) -> None:
  """Waits until every process is at the place of this name."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def check_same(what: str, arrays: Sequence[np.ndarray]) -> None:
  """Waits for all processes, and raises InputError where these arrays are not the same in each."""
  if jax.process_count() > 1:
    digest = zlib.crc32(b"".join(array.tobytes() for array in arrays))
    if len({*multihost_utils.process_allgather(np.uint32(digest)).tolist()}) > 1:
      raise InputError(f"{what} is not the same in all processes: give all the same files")


def any_process(flag: bool) -> bool:
  """Whether `flag` is true in any process; all of them call this, and wait for each other.

  >>> any_process(False), any_process(True)
  (False, True)
  """
  if jax.process_count() == 1:
    return flag
  return bool(multihost_utils.process_allgather(np.array(flag)).any())


def first_message(line: str) -> str:
  """The first process's line, or of those after it, that is not empty; all of them call this.

  >>> first_message("no end"), first_message("")
  ('no end', '')
  """
  if jax.process_count() == 1:
    return line
  own = np.frombuffer(line.encode()[:_LINE_BYTES].ljust(_LINE_BYTES), np.uint8)
  lines = multihost_utils.process_allgather(own)
  return next(filter(None, (row.tobytes().decode(errors="replace").strip() for row in lines)), "")


def print_once(line: str) -> None:
  """Prints a line on stderr, once for all processes."""
  if is_first():
    print(line, file=sys.stderr)


@contextlib.contextmanager
def only_first_prints() -> Iterator[None]:
  """Only the first process prints; what goes to stderr is heard of all."""
  with contextlib.ExitStack() as stack:
    if not is_first():
      nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
      stack.enter_context(contextlib.redirect_stdout(nowhere))
    yield
