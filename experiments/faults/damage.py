"""Checkpoints that are not what was saved: a flipped bit, a file cut short, a file gone."""

import functools
import pathlib
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np

from experiments.faults.outcome import difference
from experiments.faults.subject import Subject
from experiments.faults.tries import Try, joined
from relpos_jax.training import checkpoint, shelf
from relpos_jax.training.checkpoint import Checkpoints
from relpos_jax.training.reading import Reader

_ALL_THE_WAY = 50  # of so many flips one is found by the command itself, which then goes on

_lock = threading.Lock()  # What one restore says is not to be heard of another.


class _Saved(NamedTuple):
  """Good checkpoints, and the octets of the states in the last two."""

  folder: pathlib.Path
  like: dict[str, jax.ShapeDtypeStruct]
  last: dict[str, bytes]
  before: dict[str, bytes]

  @property
  def newest(self) -> pathlib.Path:
    return self.folder / str(max(shelf.numbered(self.folder)))


def bits(subject: Subject, rng: random.Random, tries: int) -> Iterator[Try]:
  """Flips one bit, every one as probable, of the newest checkpoint; then restores."""
  saved = _saved(subject)
  files = _files(saved.newest)
  sizes = [file.stat().st_size for file in files]
  for number in range(tries):
    (file,) = rng.choices(files, sizes)
    bit = rng.randrange(8 * file.stat().st_size)
    damage = functools.partial(_flip, bit=bit)
    what = f"bit {bit} of {file.relative_to(saved.newest)}"
    if (number + 1) % _ALL_THE_WAY:
      yield _restored(subject, saved, what, file, damage)
    else:
      yield _trained(subject, saved, rng, number)


def files(subject: Subject, rng: random.Random, tries: int) -> Iterator[Try]:
  """Cuts short and removes files of the newest checkpoint, one at a time; at most `tries` files."""
  saved = _saved(subject)
  for file in _files(saved.newest)[:tries]:
    name, size = file.relative_to(saved.newest), rng.randrange(file.stat().st_size)
    cut = lambda path, size=size: path.write_bytes(path.read_bytes()[:size])
    yield _restored(subject, saved, f"{name} cut to {size} bytes", file, cut)
    yield _restored(subject, saved, f"{name} removed", file, pathlib.Path.unlink)


def _saved(subject: Subject) -> _Saved:
  subject.undisturbed()
  folder = subject.workdir_undisturbed() / "checkpoints"
  with Checkpoints(folder) as checkpoints:
    *_, before, last = checkpoints.steps()
    like = Reader(folder).shapes(last)
    states = [_octets(checkpoints.restore(step, like=like)) for step in (last, before)]
  return _Saved(folder, like, *states)


def _octets(state: dict) -> dict[str, bytes]:
  return {name: np.asarray(array).tobytes() for name, array in state.items()}


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in folder.rglob("*") if path.is_file())


def _flip(path: pathlib.Path, bit: int) -> None:
  content = bytearray(path.read_bytes())
  content[bit // 8] ^= 1 << bit % 8
  path.write_bytes(content)


def _restored(
  subject: Subject, saved: _Saved, what: str, file: pathlib.Path, damage: Callable
) -> Try:
  """Damages a copy, restores the newest state, and looks at all of it."""
  said: list[str] = []
  with _lock, mock.patch.object(checkpoint.processes, "tell", said.append):
    copy = _copied(saved.folder, subject.folder / "damaged")
    damage(copy / file.relative_to(saved.folder))
    with Checkpoints(copy) as checkpoints:
      try:
        found = _octets(checkpoints.restore(like=saved.like))
      except Exception as error:  # Whatever it is, the step before should have been taken.
        return Try(what, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    is_aside = (copy / f"damaged-{saved.newest.name}" / "reason.txt").is_file()
  if found == saved.last and not said and not is_aside:
    return Try(what, "", {"harmless": 1})
  problems = {
    "SILENT: other values came back": found not in (saved.last, saved.before),
    "the values are those of the step that was set aside": found == saved.last,
    "not set aside": not is_aside,
    f"not told in one line: {said}": len(said) != 1 or "is damaged: " not in said[0],
  }
  return Try(what, joined(problems), {"fell back": 1})


def _copied(folder: pathlib.Path, copy: pathlib.Path) -> pathlib.Path:
  shutil.rmtree(copy, ignore_errors=True)
  return shutil.copytree(folder, copy)


def _trained(subject: Subject, saved: _Saved, rng: random.Random, number: int) -> Try:
  """A bit of the parameters' largest file is flipped, and the command goes on with the run."""
  workdir = _copied(saved.folder.parent, subject.folder / f"damaged-run-{number}")
  step = saved.newest.name
  largest = max(_files(workdir / "checkpoints" / step), key=lambda path: path.stat().st_size)
  bit = rng.randrange(8 * largest.stat().st_size)
  _flip(largest, bit)
  with subject.launched(workdir) as running:
    status = running.wait()
  told = len(re.findall(f"^checkpoint .*/{step} is damaged: .*set aside as", running.log(), re.M))
  problems = {
    f"exit status {status}": status != 0,
    f"told {told} times": told != 1,
    difference(workdir, subject.undisturbed()): True,
  }
  what = f"bit {bit} of its largest file, and training goes on"
  return Try(what, joined(problems), {"fell back": 1})
