"""Faults done to files, what they leave, and the line that refuses an input."""

import pathlib
from collections.abc import Callable

import numpy as np
import orbax.checkpoint as ocp
import pytest

from experiments.errors import InputError
from experiments.training.checkpoint_reader import read_kinds


def refusal(function: Callable, *args, **options) -> str:
  """Returns the message of the InputError that a call raises, which has one line."""
  with pytest.raises(InputError) as caught:
    function(*args, **options)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def flip_bits(content: bytes) -> bytes:
  """Flips a bit of every 101st byte: parts of some files are not in use."""
  flipped = bytearray(content)
  flipped[::101] = (octet ^ 4 for octet in flipped[::101])
  return bytes(flipped)


def damage(step: pathlib.Path) -> None:
  """Flips bits in every data file of a checkpoint."""
  for file in step.rglob("d/*"):
    file.write_bytes(flip_bits(file.read_bytes()))


def read_step(step: pathlib.Path) -> dict[str, np.ndarray]:
  """Reads the arrays of a checkpoint by name."""
  args = dict.fromkeys(read_kinds(step), ocp.RestoreArgs(restore_type=np.ndarray))
  return ocp.PyTreeCheckpointer().restore(step / "state", restore_args=args)
