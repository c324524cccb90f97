"""The records of a sweep, and its results file."""

import collections
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.sweeps.cells import Cell, Known, own_record, read_known
from relpos_jax.errors import InputError
from relpos_jax.evaluation.record import to_line
from relpos_jax.training.workdir import environment, write_whole


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
      InputError: a results file is damaged, or of other cells: see `read_known`.
    """
    self.path = results / f"{sweep}.jsonl"
    self._sweep, self._cells = sweep, cells
    known = read_known(results, sweep, cells)
    self._others = known.others
    self.records: dict[str, dict[str, Any]] = {}
    self.notes: list[str] = []
    for cell in cells:
      self._look_for(cell, known)
    self._note_commits()

  def _look_for(self, cell: Cell, known: Known) -> None:
    if record := own_record(cell) or known.here.get(cell.digest):
      self.add(cell, record)
    elif cell.digest in known.elsewhere:
      name, record = known.elsewhere[cell.digest]
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
    """Writes the results file whole, if there is anything to write."""
    found = [self.records[cell.name] for cell in self._cells if cell.name in self.records]
    text = "".join(map(to_line, [*found, *self._others]))
    try:
      self.path.parent.mkdir(parents=True, exist_ok=True)
      if text:
        write_whole(self.path, text)
    except OSError as error:
      raise InputError(f"cannot write {self.path} ({error.strerror}): give --results") from error
