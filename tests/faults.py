"""Faults done to files, and the one line with which the project refuses an input."""

import pathlib
from collections.abc import Callable

import pytest

from experiments.errors import InputError


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
