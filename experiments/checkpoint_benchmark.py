r"""Measures what the digests of a checkpoint cost, beside saving and restoring it without them.

  python -m experiments.checkpoint_benchmark
  python -m experiments.checkpoint_benchmark --megabytes=100 --repetitions=20 --folder=/mnt/disk

Random float32 arrays are saved, and restored, with and without digests, in turn, in one process,
each until it is done; a ratio is of two neighbours in time. Doing it without stands there twice:
the ratio of the two is the noise. Where a disk's noise hides what the digests cost, they alone,
which saving waits for, are the bound. What is restored was written a moment ago: it is in memory.
"""

import contextlib
import io
import itertools
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np

from experiments import command
from relpos_jax.errors import InputError
from relpos_jax.evaluation.cost import compare, ratio_quartiles
from relpos_jax.training import manifest
from relpos_jax.training.checkpoint import Checkpoints
from relpos_jax.training.workdir import check_writable, environment

FLAGS = dict(
  megabytes=command.Flag(1000, "of the state"),
  repetitions=command.Flag(6, "of every pair"),
  folder=command.Flag("", "on the disk to measure; by default the one for temporary files"),
)
_NUM_ARRAYS = 16
_BARE, _AGAIN, _ALONE = "without digests", "without digests (again)", "digests alone"


def main(megabytes: int, repetitions: int, folder: str) -> None:
  """Prints a Markdown table: seconds, and the ratio's median and quartiles."""
  if megabytes < 1 or repetitions < 1:
    raise InputError("--megabytes and --repetitions must be at least 1")
  if folder:
    if not pathlib.Path(folder).is_dir():
      raise InputError(f"no folder {folder}: give another --folder")
    check_writable(pathlib.Path(folder), "give another --folder")
  state = make_state(megabytes)
  where = environment()
  print(f"{megabytes} MB in {_NUM_ARRAYS} float32 arrays; {where['devices']}, ", end="")
  print(f"{where['cpu_cores']} cores of {where['cpu']}, {where['date']}\n")
  print("| | seconds | ratio to without digests | quartiles |\n|---|---|---|---|")
  with tempfile.TemporaryDirectory(dir=folder or None) as temporary:
    for what, make in (("save", _savers), ("restore", _restorers)):
      functions, tidy = make(pathlib.Path(temporary, what), state)
      functions[_ALONE] = lambda: manifest.digests(state)
      pairs = [(name, _BARE) for name in (_AGAIN, "with digests", _ALONE)]
      for function in functions.values():
        function()
      tidy()
      for (name, _), (seconds, against) in compare(functions, pairs, repetitions, tidy).items():
        low, median, high = ratio_quartiles(seconds, against)
        row = (f"{what} {name}", f"{np.median(seconds):.2f}", f"{median:.3f}")
        print(f"| {' | '.join(row)} | {low:.3f} to {high:.3f} |", flush=True)


def make_state(megabytes: int) -> dict[str, jax.Array]:
  """Random arrays of so many bytes, for zeros are stored smaller.

  >>> sum(array.nbytes for array in make_state(1).values())
  999424
  """
  shape = (int(megabytes * 1e6 / 4 / _NUM_ARRAYS / 128), 128)
  keys = jax.random.split(jax.random.key(0), _NUM_ARRAYS)
  return {f"array_{i}": jax.random.normal(key, shape) for i, key in enumerate(keys)}


def _savers(folder: pathlib.Path, state: dict) -> tuple[dict[str, Callable], Callable]:
  """Each saves to a new folder and waits; what was saved is deleted between."""
  numbers = itertools.count()

  def save() -> None:
    with Checkpoints(folder / str(next(numbers))) as checkpoints:
      checkpoints.save(0, state)

  functions = {"with digests": save, _BARE: _without(save), _AGAIN: _without(save)}
  return functions, lambda *_: shutil.rmtree(folder, ignore_errors=True)


def _restorers(folder: pathlib.Path, state: dict) -> tuple[dict[str, Callable], Callable]:
  """Each restores all of what was saved with digests, or without."""
  functions = {}
  for name in ("with digests", _BARE, _AGAIN):
    checkpoints = Checkpoints(folder / name.replace(" ", "-"))
    save = lambda checkpoints=checkpoints: (checkpoints.save(0, state), checkpoints.steps())
    (save if name == "with digests" else _without(save))()
    functions[name] = lambda checkpoints=checkpoints: checkpoints.restore(like=state)
    with contextlib.redirect_stderr(io.StringIO()):  # It tells once that it has no digests.
      functions[name]()
  return functions, lambda *_: None


def _without(function: Callable[[], Any]) -> Callable[[], Any]:
  return mock.patch.object(manifest, "digests", dict.fromkeys)(function)


if __name__ == "__main__":
  command.run(main, FLAGS)
