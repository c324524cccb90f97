"""The raw results of sweeps, and which of their runs may stand in one table."""

import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.reports.records import Record, naming, read_checked
from experiments.values import defaults
from relpos_jax.errors import InputError
from relpos_jax.evaluation.bleu import bleu_of_counts, sentence_counts
from relpos_jax.evaluation.record import read_records
from relpos_jax.training.workdir import short_commit


class Table(NamedTuple):
  """The runs of each row of a sweep, all of one setting, and lines about those set apart."""

  sweep: str
  rows: Mapping[str, Sequence[Record]]
  apart: Sequence[str]

  def records(self) -> list[Record]:
    """All that stand in it."""
    return [record for runs in self.rows.values() for record in runs]


def read_tables(folder: pathlib.Path) -> dict[str, Table]:
  """The table of each FOLDER/SWEEP.jsonl, by sweep.

  Runs of another commit, budget, hardware, BLEU or test set than most of a sweep are set apart, and
  so are those of another config than most of their row.

  Raises:
    InputError: there are no records, or one is half-written, twice there or not what it says.
  """
  files = files_of("translation", folder)
  tables = {
    file.stem: table_of(file.stem, read_checked(file, _check_split), setting) for file in files
  }
  if not tables:
    raise InputError(
      f"no records in {folder}/*.jsonl: run a sweep first, with "
      "python -m experiments.sweep --config=configs/table1.py"
    )
  return tables


def files_of(task: str, folder: pathlib.Path) -> list[pathlib.Path]:
  """The FOLDER/SWEEP.jsonl with records of a task, by name.

  Raises:
    InputError: a line is no record, or of no known task.
  """
  return [file for file in sorted(folder.glob("*.jsonl")) if task in tasks_of(file)]


def tasks_of(file: pathlib.Path) -> set[str]:
  """The tasks of a file's records; a sweep has one.

  Raises:
    InputError: a line is no record, or of no known task.
  """
  tasks = set()
  for number, record in enumerate(read_records(file), start=1):
    with naming(file, number):
      tasks.add(_task(record))
  return tasks


def _task(record: Record) -> str:
  if not isinstance(record["config"], dict):
    raise ValueError("'config' is no dict")
  return defaults(record["config"]).task


def table_of(
  sweep: str,
  records: Sequence[Record],
  describe: Callable[[Record], dict[str, str]],
  describe_seed: Callable[[Record], dict[str, str]] = lambda record: {},
) -> Table:
  """The table of these records, those set apart that `describe` tells from most.

  And those that `describe_seed` tells from most of their seed.
  """
  kept, apart = _keep_most(records, describe)
  for name, of in (("seed", describe_seed), ("row", _config_of_row)):
    parts = [_keep_most(group, of) for group in _grouped(kept, name).values()]
    kept = [record for runs, _ in parts for record in runs]
    apart += [line for _, lines in parts for line in lines]
  rows = _grouped(sorted(kept, key=lambda record: record["seed"]), "row")
  return Table(sweep, {row: rows[row] for row in _grouped(records, "row") if row in rows}, apart)


def _grouped(records: Sequence[Record], name: str) -> dict[Any, list[Record]]:
  groups: dict[Any, list[Record]] = {}
  for record in records:
    groups.setdefault(record[name], []).append(record)
  return groups


def config_value(record: Record, name: str) -> Any:
  """The value of a dotted key of a run's config."""
  otherwise = functools.reduce(getattr, name.split("."), defaults(record["config"]))
  return record["config"].get(name, otherwise)


def split_counts(record: Record, split: str) -> np.ndarray:
  """`sentence_counts` of a split: integers [sentences, 10]."""
  return sentence_counts(np.array(record["sentences"][split])[:, 1:])


def split_lengths(record: Record, split: str) -> np.ndarray:
  """The length of each sentence of a split: the tokens of its longer side."""
  return np.array(record["sentences"][split])[:, 0]


def made_how(record: Record, size: str) -> dict[str, str]:
  """What runs of any task must have in common to stand in one table, in words.

  `size`: what a batch is counted in.
  """
  budget = record["budget"]
  return dict(
    commit=short_commit(record["commit"]),
    devices=record["hardware"].partition(",")[0],
    updates=f"{budget['updates']:,}",
  ) | {size: f"{budget['tokens_per_update']:,}"}


def setting(record: Record) -> dict[str, str]:
  """What all runs of a table of translations have in common, in words."""
  scores = record["scores"]
  return made_how(record, "tokens") | dict(
    BLEU=", ".join(sorted({s for of in scores.values() for s in of["signatures"].values()})),
    sentences=", ".join(
      described(name, [(length, ref_len) for length, _, ref_len, *_ in sentences])
      for name, sentences in sorted(record["sentences"].items())
    ),
  )


def described(name: str, fixed: Sequence[Any]) -> str:
  """A split's size, and letters that tell it from others: of what no model changes in its rows.

  >>> described("test", [5, 7, 4])
  '3 of test (ca0176)'
  """
  letters = hashlib.sha256(json.dumps(fixed).encode()).hexdigest()[:6]
  return f"{len(fixed):,} of {name} ({letters})"


def _check_split(record: Record, split: str) -> None:
  of, sentences = record["scores"][split], record["sentences"][split]
  if not sentences or any([type(x) for x in row] != 7 * [int] for row in sentences):
    raise ValueError(f"the sentences of {split} are not seven whole numbers each")
  for name in ("sacrebleu", "paper_bleu"):
    if not isinstance(of.get(name), int | float) or name not in of["signatures"]:
      raise ValueError(f"no number {name!r} with its signature in the scores of {split}")
  value = float(bleu_of_counts(split_counts(record, split).sum(axis=0)))
  if not abs(value - of["sacrebleu"]) <= 0.01:  # NaN, too
    raise ValueError(f"the sentences of {split} give BLEU {value:.2f}, not {of['sacrebleu']:.2f}")


def _config_of_row(record: Record) -> dict[str, str]:
  """The config's changed values but the seed, which each run has its own."""
  config = {f"config.{name}": json.dumps(value) for name, value in record["config"].items()}
  config.pop("config.seed", None)
  return dict(sorted(config.items()))


def _keep_most(
  records: Sequence[Record], describe: Callable[[Record], dict[str, str]]
) -> tuple[list[Record], list[str]]:
  """The records of the setting that most have, the latest of such; and lines about the others."""
  groups: dict[str, list[Record]] = {}
  for record in records:
    groups.setdefault(json.dumps(describe(record)), []).append(record)
  by_size = lambda group: (len(group), max(record["date"] for record in group))
  kept = max(groups.values(), key=by_size, default=[])
  others = [record for group in groups.values() if group is not kept for record in group]
  return kept, [_why_apart(record, describe(record), describe(kept[0])) for record in others]


def _why_apart(record: Record, own: Mapping[str, str], wanted: Mapping[str, str]) -> str:
  names = [name for name in {**own, **wanted} if own.get(name) != wanted.get(name)]
  reasons = [f"{n} {own.get(n, 'unset')}, not {wanted.get(n, 'unset')}" for n in names]
  return f"{record['row']}, seed {record['seed']}: {'; '.join(reasons)}"
