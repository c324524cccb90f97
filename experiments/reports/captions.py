"""What the sections on all tasks say of the runs of a table."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence

from experiments.reports.records import Record
from experiments.reports.results import Table, config_value
from experiments.values import defaults, flatten
from relpos_jax.training.workdir import short_commit


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
  commit = short_commit(records[0]["commit"]).replace("-dirty", " with changes")
  versions = [each(records, lambda r, n=n: f"{n} {r['packages'].get(n)}") for n in packages]
  return (
    f"{each(records, lambda r: r['hardware'])}; {each(records, lambda r: r['date'][:10])}; "
    f"commit {commit}; {', '.join(versions)}"
  )


def of_which(records: Sequence[Record]) -> str:
  """Of which parameters numbers are: training evaluates those it has, scores are of their mean."""
  averaged = each(records, lambda record: config_value(record, "decoding.average_checkpoints"))
  if averaged == "1":
    return "Valid loss and scores are of the parameters after the last update."
  return (
    "Valid loss and learning curves are of the parameters after an update, scores of the mean of "
    f"the last {averaged} checkpoints."
  )


def valid_loss(runs: Sequence[Record], mean: Callable[[Sequence[float], int], str]) -> str:
  """That after the last update: the mean of those that are finite, and how many are not.

  >>> valid_loss([dict(curve=[[9, 2.0, None]]), dict(curve=[[9, None, None]])], lambda x, _: f"{x}")
  '[2.0] (1 not finite)'
  """
  losses = [run["curve"][-1][1] for run in runs]
  finite = [loss for loss in losses if loss is not None]
  if not finite:
    return "not finite"
  lost = len(losses) - len(finite)
  return mean(finite, 3) + (f" ({lost} not finite)" if lost else "")


def how_rows_differ(table: Table) -> list[str]:
  """The lines with each row's values of what is not the same in all their configs."""
  if len(table.rows) < 2:
    return []
  values = _differing({row: runs[0] for row, runs in table.rows.items()})
  keys = [*next(iter(values.values()))]
  if not keys:
    return ["The rows' configs do not differ.", ""]
  where, told = "", lambda of: ", ".join(f"`{key}={value}`" for key, value in of.items())
  if len(keys) == 1:
    where, told = f" in `{keys[0]}` alone", lambda of: f"`{of[keys[0]]}`"
  rows = "; ".join(f"{row}: {told(of)}" for row, of in values.items())
  return [f"The rows' configs differ{where}: {rows}.", ""]


def _differing(runs: Mapping[str, Record]) -> dict[str, dict[str, str]]:
  """By row and dotted key the values that are not the same in all configs, but for the seeds."""
  values = {row: _values(run) for row, run in runs.items()}
  keys = sorted({key for of in values.values() for key in of} - {"seed"})
  of_key = lambda key: {row: of.get(key, "unset") for row, of in values.items()}
  differing = [key for key in keys if len({*of_key(key).values()}) > 1]
  return {row: {key: of_key(key)[row] for key in differing} for row in values}


def _values(record: Record) -> dict[str, str]:
  """All values of a config by dotted key, the defaults too, as on a command line."""
  config = flatten(defaults(record["config"])) | record["config"]
  # Where a float belongs, 0 and 0.0 are the same value.
  shown = lambda x: x if x and isinstance(x, str) else json.dumps(x).removesuffix(".0")
  return {key: shown(value) for key, value in config.items()}


def not_finite(table: Table) -> list[str]:
  """The lines about valid losses that a mean or a picture could not hold."""
  lines = []
  for record in table.records():
    losses = [loss for _, loss, _ in record["curve"]]
    if lost := losses.count(None):
      lines.append(f"- {record['row']}, seed {record['seed']}: {lost} of {len(losses)} evaluations")
  if not lines:
    return []
  return ["Valid losses that were not finite, and are in no mean and no picture:", "", *lines, ""]


def set_apart(table: Table) -> list[str]:
  """The lines about the runs that are in no number of the table."""
  if not table.apart:
    return []
  return ["Set apart, and in no number here:", "", *(f"- {line}" for line in table.apart), ""]
