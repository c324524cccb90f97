"""The records of a sweep, and its results file."""

import collections
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.locks import in_turn
from experiments.sweeps.cells import Cell, own_record
from relpos_jax.errors import InputError
from relpos_jax.evaluation.record import read_records, to_line
from relpos_jax.training.workdir import environment, write_whole

Record = dict[str, Any]


class Book:
  """What is known of a sweep's cells.

  Attributes:
    path: the results file, RESULTS/SWEEP.jsonl.
    records: of the finished cells, by the cell's name.
    notes: for the user, a line each: whose record another sweep had, and what is of another commit.
  """

  def __init__(self, results: pathlib.Path, sweep: str, cells: Sequence[Cell]):
    """Finds what is finished: in the cells' folders, in the sweep's results, in those of others.

    Raises:
      InputError: a line of a results file is half-written, two records in the sweep's own file are
        of one cell, or one is of a cell by its name and not by its config. Nothing of that may be
        overwritten.
    """
    self.path = results / f"{sweep}.jsonl"
    self._sweep, self._cells = sweep, cells
    here, _ = _read_own(self.path, cells)
    elsewhere = _read_others(self.path)
    self.records: dict[str, Record] = {}
    self.notes: list[str] = []
    for cell in cells:
      self._look_for(cell, here, elsewhere)
    self._note_commits()

  def _look_for(
    self, cell: Cell, here: Mapping[str, Record], elsewhere: Mapping[str, tuple[str, Record]]
  ) -> None:
    if record := own_record(cell) or here.get(cell.digest):
      self.add(cell, record)
    elif cell.digest in elsewhere:
      name, record = elsewhere[cell.digest]
      self.notes.append(f"{cell.name} is {record['row']!r}, seed {record['seed']}, of {name}")
      self.add(cell, record)

  def _note_commits(self) -> None:
    now = environment()["git_commit"]
    commits = collections.Counter(record["commit"] for record in self.records.values())
    for commit, number in commits.items():
      if commit != now:
        self.notes.append(
          f"{number} of {len(self._cells)} cells were finished at commit {commit}, now {now}: to "
          f"train them again, delete their lines in {self.path} and their folders"
        )

  def add(self, cell: Cell, record: Mapping[str, Any]) -> None:
    """Enters a finished cell."""
    self.records[cell.name] = {**record, "sweep": self._sweep, "row": cell.row}

  def write(self) -> None:
    """Writes the results file whole, with what others wrote meanwhile, if there is anything.

    Raises:
      InputError: it cannot be written, or what others wrote is no such file as this sweep's.
    """
    try:
      self.path.parent.mkdir(parents=True, exist_ok=True)
      with in_turn(self.path.parent):
        if text := self._text():
          write_whole(self.path, text)
    except OSError as error:
      raise InputError(f"cannot write {self.path} ({error.strerror}): give --results") from error

  def _text(self) -> str:
    here, others = _read_own(self.path, self._cells)
    found = [self.records.get(cell.name) or here.get(cell.digest) for cell in self._cells]
    return "".join(map(to_line, [*filter(None, found), *others]))


def _read_own(path: pathlib.Path, cells: Sequence[Cell]) -> tuple[dict[str, Record], list[Record]]:
  """The records of a sweep's own file: of its cells, by digest; of seeds and rows not asked for."""
  planned = {(cell.row, cell.seed): cell for cell in cells}
  here, others, seen = {}, [], set()
  for record in read_records(path):
    key = record["row"], record["seed"]
    if key in seen:
      raise InputError(f"{path} has two records of {key[0]!r}, seed {key[1]}: delete one")
    seen.add(key)
    if key not in planned:
      others.append(record)
    elif record["digest"] == planned[key].digest:
      here[record["digest"]] = record
    else:
      raise InputError(
        f"{path} has {key[0]!r}, seed {key[1]}, of another config ({record['digest']}, not "
        f"{planned[key].digest}): move that file, or give another --results or --config.name"
      )
  return here, others


def _read_others(own: pathlib.Path) -> dict[str, tuple[str, Record]]:
  """The records of all other files, by digest, each with its file's name."""
  files = [path for path in sorted(own.parent.glob("*.jsonl")) if path != own]
  found = [(path.name, record) for path in files for record in read_records(path)]
  return {record["digest"]: (name, record) for name, record in found}
