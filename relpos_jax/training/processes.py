"""What the processes of a run decide and say together."""

import sys

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first() -> bool:
  """Whether this is the process that changes files and speaks for all."""
  return jax.process_index() == 0


def anywhere(flag: bool) -> bool:
  """Whether `flag` is true in any process; all of them call this, and wait for each other.

  >>> anywhere(False), anywhere(True)
  (False, True)
  """
  if jax.process_count() == 1:
    return flag
  return bool(multihost_utils.process_allgather(np.array(flag)).any())


def tell(line: str) -> None:
  """Prints a line on stderr, once for all processes."""
  if is_first():
    print(line, file=sys.stderr)
