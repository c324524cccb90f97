"""What the sections on all tasks say of the runs of a table."""

import statistics
from collections.abc import Callable, Sequence

from experiments.reports.results import Record, Table


def each(records: Sequence[Record], of: Callable[[Record], object]) -> str:
  """What it is of the records, every value once.

  >>> each([dict(seed=1), dict(seed=0), dict(seed=1)], lambda record: record["seed"])
  '0, 1'
  """
  return ", ".join(sorted({str(of(record)) for record in records}))


def seeds(runs: Sequence[Record]) -> str:
  """Those of a row."""
  return ", ".join(str(run["seed"]) for run in runs)


def minutes(records: Sequence[Record]) -> str:
  """How long a run took."""
  median = statistics.median(record["budget"]["minutes"] for record in records)
  return f"{median:.1f} minutes (the median)"


def origin(records: Sequence[Record], packages: Sequence[str] = ("jax",)) -> str:
  """Where and when the runs were made, and of which code: a table's are of one commit."""
  commit = (records[0]["commit"] or "unknown")[:12]
  changed = any((record["commit"] or "").endswith("-dirty") for record in records)
  versions = [each(records, lambda r, n=n: f"{n} {r['packages'].get(n)}") for n in packages]
  return (
    f"{each(records, lambda r: r['hardware'])}; {each(records, lambda r: r['date'][:10])}; "
    f"commit {commit}{' with changes' if changed else ''}; {', '.join(versions)}"
  )


def set_apart(table: Table) -> list[str]:
  """The lines about the runs that are in no number of the table."""
  if not table.apart:
    return []
  return ["Set apart, and in no number here:", "", *(f"- {line}" for line in table.apart), ""]
