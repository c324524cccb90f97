"""Trains as `experiments.train` does, with batches of NaN, or killing itself at a certain file.

  python tests/chaos/disturbed.py --nan=7,8 --order=FILE --kill_at=NAME --config=...

The loss of a batch is not a number where its targets lie beyond the vocabulary.
"""

import os
import pathlib
import signal
import zlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from experiments import command, train
from experiments.data.batching import Batch, Batches
from experiments.data.tokenizer import PAD
from experiments.training.processes import is_first
from experiments.translation.task import Translation

FLAGS = train.FLAGS | dict(
  nan=command.Flag("", "the batches whose loss is to be NaN, counted from 0"),
  order=command.Flag(os.devnull, "the file for the number and a checksum of each batch"),
  kill_at=command.Flag("", "SIGKILL to this process once a file of this name is written"),
)

_BEYOND = 2**30


def main(nan: str, order: str, kill_at: str, **values: Any) -> None:
  """Trains with the disturbances."""
  poisoned, make = {int(word) for word in nan.split(",") if word}, Translation.make_batches

  def make_batches(self, *arguments):
    training, valid = make(self, *arguments)
    return _Poisoned(training, poisoned, pathlib.Path(order)), valid

  with (
    mock.patch.object(Translation, "make_batches", make_batches),
    mock.patch("os.replace", _killing(os.replace, kill_at)),
    mock.patch("os.rename", _killing(os.rename, kill_at)),
  ):
    train.main(**values)


def _killing(rename: Callable, name: str) -> Callable:
  def rename_and_die(source, target, **options):
    rename(source, target, **options)
    if os.path.basename(target) == name:
      os.kill(os.getpid(), signal.SIGKILL)

  return rename_and_die


class _Poisoned:
  def __init__(self, batches: Batches, poisoned: set[int], order: pathlib.Path):
    self._batches, self._poisoned, self._order = batches, poisoned, order
    self.examples, self.first_steps = batches.examples, batches.first_steps

  def __str__(self) -> str:
    return str(self._batches)

  def __getitem__(self, number: int) -> Batch:
    batch = self._batches[number]
    if is_first():
      with open(self._order, "a", encoding="utf-8") as file:
        file.write(f"{number} {_checksum(batch)}\n")
    if number in self._poisoned:
      batch = batch._replace(target=np.where(batch.target == PAD, PAD, _BEYOND).astype(np.int32))
    return batch


def _checksum(batch: Batch) -> int:
  """Returns the checksum of a batch's pairs in their order, without rows of padding."""
  rows = np.concatenate(batch, axis=1)
  return zlib.crc32(rows[(rows != PAD).any(axis=1)].tobytes())


if __name__ == "__main__":
  command.run(main, FLAGS)
