"""Records of runs as files have them: each is whole, agrees with itself, and is there once."""

import contextlib
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments.values import defaults
from relpos_jax.errors import InputError
from relpos_jax.evaluation.record import digest, read_records

Record = Mapping[str, Any]

_KINDS: dict[str, type] = dict(
  **dict.fromkeys(("sweep", "row", "digest", "hardware", "date"), str),
  **dict.fromkeys(("config", "packages", "budget", "scores", "sentences"), dict),
  seed=int,
  curve=list,
)


@contextlib.contextmanager
def naming(file: pathlib.Path, number: int) -> Iterator[None]:
  """Tells of which line a mistake is."""
  try:
    yield
  except (KeyError, TypeError, ValueError) as error:
    raise InputError(f"{file}, line {number}: {error}: restore or delete that line") from error


def read_checked(file: pathlib.Path, check_split: Callable[[Record, str], None]) -> list[Record]:
  """All records of a file.

  Raises:
    InputError: one is half-written, twice there, another seed's copy or not what it says, as
      `check_split` finds of each split, by raising KeyError, TypeError or ValueError.
  """
  records = read_records(file)
  for number, record in enumerate(records, start=1):
    with naming(file, number):
      _check(record, file.stem, check_split)
  _check_distinct(file, records)
  return records


def _check_distinct(file: pathlib.Path, records: Sequence[Record]) -> None:
  """Raises InputError if a cell is there twice, or one run of a row as two seeds'."""
  seen: dict[tuple[str, int | str], int] = {}
  for number, record in enumerate(records, start=1):
    row, seed = record["row"], record["seed"]
    told = {(row, seed): f"both are {row}, seed {seed}"}
    # Seeds that diverged from the start may agree.
    if any(loss is not None for _, loss, _ in record["curve"]):
      numbers = json.dumps([record["sentences"], record["curve"]])
      told[row, numbers] = f"{row} has the same sentences and curve, so one is a copy"
    for key, words in told.items():
      if (first := seen.setdefault(key, number)) != number:
        raise InputError(f"{file}, lines {first} and {number}: {words}: delete one")


def _check(record: Record, sweep: str, check_split) -> None:
  """Raises KeyError, TypeError or ValueError unless a record is whole and agrees with itself."""
  for name, kind in _KINDS.items():
    if not isinstance(record[name], kind):
      raise ValueError(f"{name!r} is no {kind.__name__}")
  if not isinstance(record["commit"], str | None):
    raise ValueError("'commit' is no str")
  if record["sweep"] != sweep:
    raise ValueError(f"its sweep is {record['sweep']!r}")
  config = record["config"]
  own = dict(seed=config.get("seed", defaults(config).seed), digest=digest(config))
  for name, value in own.items():
    if record[name] != value:
      raise ValueError(f"its {name} is {record[name]!r}, its config's {value!r}")
  for name in ("updates", "tokens_per_update", "minutes"):
    if not isinstance(record["budget"].get(name), int | float):
      raise ValueError(f"no number {name!r} in its budget")
  if not record["curve"] or not all(map(_is_point, record["curve"])):
    raise ValueError("its curve is no rows of a step and two numbers, null where not finite")
  if not record["scores"] or record["scores"].keys() != record["sentences"].keys():
    raise ValueError("its scores and its sentences are of different splits")
  for split in record["scores"]:
    check_split(record, split)


def _is_point(row: Any) -> bool:
  match row:
    case [int(), loss, score]:
      return all(x is None or math.isfinite(x) for x in (loss, score))
  return False
