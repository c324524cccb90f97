r"""Trains as `experiments.train` does, on some batches of which the loss is not a number.

  python -m experiments.faults.poisoned --batches=7,8 --order=FILE --config=...

A poisoned batch has targets beyond the vocabulary. What pairs each batch has is written to a file,
a line a batch: its number, counted from 0, and a checksum.
"""

import pathlib
import zlib
from typing import Any
from unittest import mock

import numpy as np

from experiments import command, train
from experiments.tasks.translation import Translation
from relpos_jax.data.batching import Batch, Batches
from relpos_jax.data.tokenizer import PAD
from relpos_jax.training.processes import is_first

FLAGS = train.FLAGS | dict(
  batches=command.Flag("", "those to poison, counted from 0, separated by commas"),
  order=command.Flag(None, "the file that the order of the data is written to"),
)

_BEYOND = 2**30


def main(batches: str, order: str, **values: Any) -> None:
  """Trains."""
  poisoned = {int(word) for word in batches.split(",") if word}
  make = Translation.make_batches

  def make_batches(self, *arguments):
    training, valid = make(self, *arguments)
    return _Poisoned(training, poisoned, pathlib.Path(order)), valid

  with mock.patch.object(Translation, "make_batches", make_batches):
    train.main(**values)


class _Poisoned:
  def __init__(self, batches: Batches, poisoned: set[int], order: pathlib.Path):
    self._batches, self._poisoned, self._order = batches, poisoned, order

  def __str__(self) -> str:
    return str(self._batches)

  def __getitem__(self, number: int) -> Batch:
    batch = self._batches[number]
    if is_first():
      with open(self._order, "a", encoding="utf-8") as file:
        file.write(f"{number} {checksum(batch)}\n")
    if number in self._poisoned:
      batch = batch._replace(target=np.where(batch.target == PAD, PAD, _BEYOND).astype(np.int32))
    return batch


def checksum(batch: Batch) -> int:
  """Of a batch's pairs in their order, whatever rows of padding follow them."""
  rows = np.concatenate(batch, axis=1)
  return zlib.crc32(rows[(rows != PAD).any(axis=1)].tobytes())


def read_order(file: pathlib.Path) -> set[tuple[int, int]]:
  """The (number, checksum) of all batches that were made."""
  lines = file.read_text(encoding="utf-8").splitlines()
  return {tuple(map(int, line.split())) for line in lines}


if __name__ == "__main__":
  command.run(main, FLAGS)
