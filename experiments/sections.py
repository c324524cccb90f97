"""Tables and pictures of the sweeps of each task, from their records."""

import json
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.evaluation import tables
from experiments.evaluation.pictures import SpreadPanel, small_multiples, spread_curves
from experiments.evaluation.records import Record, Rows
from experiments.evaluation.tables import format_interval, student_interval
from experiments.graphs import task as graphs
from experiments.music import task as music
from experiments.training.environment import short_commit
from experiments.translation import scores as translation
from experiments.translation.scores import GIVEN

# Shaw et al. 2018: Table 1 is on newstest2014, Tables 2 and 3 on newstest2013.
_BY_DISTANCE = {0: 12.5, 1: 25.5, 2: 25.8, 4: 25.9, 16: 25.8, 64: 25.9, 256: 25.8}
_PAPER = {
  "table1": {
    "paper, EN-DE base": dict(relative=26.8, sinusoidal=26.5),
    "paper, EN-DE big": dict(relative=29.2, sinusoidal=27.9),
    "paper, EN-FR base": dict(relative=38.7, sinusoidal=38.2),
    "paper, EN-FR big": dict(relative=41.5, sinusoidal=41.2),
  },
  "table2": {"paper, EN-DE base": {f"k={k}": bleu for k, bleu in _BY_DISTANCE.items()}},
  "table3": {
    "paper, EN-DE base": {
      "keys and values": 25.8,
      "keys": 25.8,
      "values": 25.3,
      "neither": 12.5,
    }
  },
}
# The numbers of distinct graphs in the test splits of CLUTRR, by length.
_DISTINCT = dict(
  zip(range(2, 11), (2, 7, 36, 185, 105, 155, 135, 124, 122), strict=True)
)
_GUESS = "most frequent class in training"
_MOST_PAIRED = 8  # rows in a table of all pairs
_MOST_BANDS = 6  # in a picture: more have a small one each


def block_of(task: str, sweep: str, rows: Rows, folder: pathlib.Path) -> str:
  """Returns the block of a sweep for its page, and draws its picture in `folder`."""
  config = _first(rows)["config"]
  if task == "music":
    return _music(sweep, rows, folder)
  if task == "graphs":
    is_chains = config["data.source"] == "clutrr"
    return _chains(sweep, rows, folder) if is_chains else _folds(sweep, rows)
  of_task = _lengths if config["evaluation.given_lengths"] else _translation
  return of_task(sweep, rows, folder)


# All tasks
# ----------------------------------------------------------------------------------------


def run_facts(rows: Rows) -> dict[str, str]:
  """Returns the budget, machine, code and versions of the runs."""
  records = [run for runs in rows.values() for run in runs]

  def each(value_of: Callable[[Record], object]) -> str:
    return ", ".join(sorted({str(value_of(record)) for record in records}))

  minutes = statistics.median(record["budget"]["minutes"] for record in records)
  return {
    "updates": each(lambda r: f"{r['budget']['updates']:,}"),
    "tokens or nodes per update": each(
      lambda r: f"{r['budget']['tokens_per_update']:,}"
    ),
    "minutes per run (median)": f"{minutes:.1f}",
    "checkpoints averaged": each(
      lambda r: (
        len(r.get("checkpoints", ())) or r["config"]["decoding.average_checkpoints"]
      )
    ),
    "hardware": each(lambda r: r["hardware"]),
    "date": each(lambda r: r["date"][:10]),
    "commit": each(lambda r: short_commit(r["commit"])),
    **{
      name: each(lambda r, n=name: r["packages"].get(n))
      for name in ("python", "jax", "flax")
    },
  }


def config_table(rows: Rows) -> str:
  """Returns a table of the config values, except the seed, that differ between rows, if any."""

  def shown(value: object) -> str:  # 0 and 0.0 are the same value
    return (
      value
      if value and isinstance(value, str)
      else json.dumps(value).removesuffix(".0")
    )

  configs = {row: runs[0]["config"] for row, runs in rows.items()}
  columns = {}
  for key in sorted({key for config in configs.values() for key in config} - {"seed"}):
    cells = {
      row: f"`{shown(config[key])}`" for row, config in configs.items() if key in config
    }
    if len({cells.get(row) for row in rows}) > 1:
      columns[key] = cells
  return tables.column_table("config", rows, columns) if columns else ""


def _section(rows: Rows, parts: Sequence[str], facts: Mapping[str, object]) -> str:
  """Returns the parts of a sweep's block, what its rows differ in, and how they were run."""
  listed = [
    f"- {name}: {value}" for name, value in (dict(facts) | run_facts(rows)).items()
  ]
  return "\n\n".join(filter(None, [*parts, config_table(rows), "\n".join(listed)]))


def _first(rows: Rows) -> Record:
  return next(iter(rows.values()))[0]


def _mean_column(rows: Rows, value_of: Callable, digits: int = 2) -> dict[str, str]:
  return {
    r: tables.mean_and_interval([*map(value_of, runs)], digits)
    for r, runs in rows.items()
  }


def _seed_columns(rows: Rows) -> dict[str, dict[str, str]]:
  """Returns the first columns of a sweep's table: seeds, and the last valid loss."""
  return {
    "seeds": {
      row: ", ".join(str(run["seed"]) for run in runs) for row, runs in rows.items()
    },
    "valid loss": _mean_column(rows, lambda run: run["curve"][-1][1], 3),
  }


def _differences(
  title: str,
  rows: Rows,
  score: Callable[[Record], float],
  digits: int = 2,
  is_paired: bool = False,
) -> str:
  """Returns the differences between rows, if there are several; significant ones (95%)
  are bold.

  If `is_paired`, the interval is that of the differences at the seeds that both rows
  have, otherwise that of the difference of two means. Runs that diverged are left out.
  More than 8 rows are compared with the first one only.
  """
  scores = {
    row: {run["seed"]: score(run) for run in runs} for row, runs in rows.items()
  }
  scores = {
    row: {k: x for k, x in of.items() if np.isfinite(x)} for row, of in scores.items()
  }

  def cell(a: str, b: str) -> str:
    values = [*scores[a].values()], [*scores[b].values()]
    if is_paired:
      seeds = sorted(scores[a].keys() & scores[b].keys())
      values = ([scores[a][seed] - scores[b][seed] for seed in seeds],)
    if not all(values):
      return "-"
    mean, half_width = interval = student_interval(*values)
    bold = "**" if half_width is not None and abs(mean) > half_width else ""
    return f"{bold}{format_interval(interval, digits, sign='+')}{bold}"

  others = [*rows][: None if len(rows) <= _MOST_PAIRED else 1]
  columns = {b: {a: cell(a, b) for a in rows if a != b} for b in others}
  return (
    tables.column_table(f"{title}, row - column", rows, columns)
    if len(rows) > 1
    else ""
  )


def _picture_title(rows: Rows) -> str:
  """Names the data and the number of seeds."""
  counts = sorted({len(runs) for runs in rows.values()})
  seeds = " to ".join(map(str, counts[:1] + counts[1:][-1:]))
  title = f"{_first(rows)['config']['data.source']}, {seeds} seed"
  return title if counts[-1] == 1 else f"{title}s: mean, lowest to highest"


def _draw_curves(
  rows: Rows, measures: list[str], picture: pathlib.Path, start: float = 0
) -> str:
  """Draws the measures, columns of the curves, over updates; returns the line that
  shows them.

  If there are many rows, draws the last of the measures alone.
  """
  panels = []
  for column, measure in enumerate(measures, start=1):
    curves = {}
    for row, runs in rows.items():
      points = [
        (x[0], x[column]) for run in runs for x in run["curve"] if x[column] is not None
      ]
      steps = sorted({step for step, _ in points if step >= start})
      curves[row] = {step: [y for x, y in points if x == step] for step in steps}
    evaluated = sorted({step for points in curves.values() for step in points})
    panels.append(
      SpreadPanel("updates", f"validation {measure}", curves, ticks=evaluated)
    )
  title = _picture_title(rows)
  if len(rows) > _MOST_BANDS:
    small_multiples(panels[-1], picture, title=title)
  else:
    spread_curves(panels, picture, title=title)
  sweep = picture.stem.removesuffix("-learning")
  return f"![Learning curves: {sweep}]({picture.parent.name}/{picture.name})"


# Translation
# --------------------------------------------------------------------------------------


def _translation(sweep: str, rows: Rows, folder: pathlib.Path) -> str:
  first = _first(rows)
  splits = sorted(first["scores"], key=lambda split: split != "test")
  columns = _seed_columns(rows)
  for kind, title in translation.TITLES.items():
    for split in splits[:1] if kind == "paper_bleu" else splits:
      scores = {
        row: [run["scores"][split] for run in runs] for row, runs in rows.items()
      }
      if all(
        kind in of for runs in scores.values() for of in runs
      ):  # old records lack some
        name = title if split == splits[0] else f"{title}, {split}"
        columns[name] = _mean_column(scores, lambda of, kind=kind: of[kind])
  for name, published in _PAPER.get(sweep.partition("-")[0], {}).items():
    columns[name] = {row: f"{bleu:.1f}" for row, bleu in published.items()}
  signatures = first["scores"][splits[0]]["signatures"]
  facts = {
    "data": f"{first['config']['data.source']} {first['config']['data.languages']}",
    **{
      f"sentences of {split}": f"{len(of):,}"
      for split, of in first["sentences"].items()
    },
    **{"sacreBLEU": signatures["sacrebleu"], "paper's BLEU": signatures["paper_bleu"]},
  }
  parts = [
    tables.column_table(sweep, rows, columns),
    _differences(
      f"sacreBLEU of {splits[0]}",
      rows,
      lambda run: run["scores"][splits[0]]["sacrebleu"],
    ),
    _draw_curves(
      rows, ["loss (nats per token)", "BLEU"], folder / f"{sweep}-learning.png"
    ),
  ]
  return _section(rows, parts, facts)


def _sentences(run: Record, splits: Sequence[str]) -> np.ndarray:
  return np.concatenate([np.array(run["sentences"][split]) for split in splits])


# Valid exact matches (%) at whose first evaluation schemes are compared, by source of
# the data.
_LEVELS = dict(scan=90, embedded=50)
_ONLY = " only"  # ends the name of a row with positions in one stack alone
_NUM_BOLD = 5  # curves of a picture, the best beyond the lengths of training


def _lengths(sweep: str, rows: Rows, folder: pathlib.Path) -> str:
  """Returns exact matches at equal valid scores, and at the end by length."""
  first = _first(rows)
  source, splits = first["config"]["data.source"], first["scores"]
  free, given = (
    [x for x in splits if x.endswith(GIVEN) == ends] for ends in (False, True)
  )
  ends = {"EOS free": free, "length given": given}
  facts = {f"sentences of {x}": f"{len(first['sentences'][x]):,}" for x in free}
  parts = [
    _at_level(sweep, rows, _LEVELS[source]),
    *(_exact_by_length(f"{sweep}: {name}", rows, of) for name, of in ends.items()),
    _draw_exact(rows, ends, folder / f"{sweep}.png"),
  ]
  return _section(rows, parts, facts | dict(data=source))


def _at_level(sweep: str, rows: Rows, level: float) -> str:
  """Returns the table of exact matches at the first step whose valid ones reach `level` percent."""
  columns: dict[str, dict[str, str]] = {"seeds": _seed_columns(rows)["seeds"]}
  for row, runs in rows.items():
    found = []
    for run in runs:
      exact = {split: dict(points) for split, points in run["exact"].items()}
      if step := next((step for step, x in exact["valid"].items() if x >= level), None):
        found.append(
          {"updates": float(step)} | {split: of[step] for split, of in exact.items()}
        )
    columns.setdefault("reached", {})[row] = f"{len(found)} of {len(runs)}"
    for name in found[0] if found else ():
      cell = tables.mean_and_interval(
        [of[name] for of in found], 0 if name == "updates" else 1
      )
      columns.setdefault(name, {})[row] = cell
  return tables.column_table(f"{sweep}: valid first at {level}%", rows, columns)


def _exact_by_length(title: str, rows: Rows, splits: Sequence[str]) -> str:
  """Returns the table of the exact matches (%) at the end, by length in tokens."""
  lengths = _sentences(_first(rows), splits)[:, 0]
  columns = {"valid": _mean_column(rows, lambda run: run["exact"]["valid"][-1][1], 1)}
  within, *longer = _bands(rows, splits, beyond=4)
  for band in (within, *longer, ~within):
    title_of_band = f"{lengths[band].min()} to {lengths[band].max()} ({band.sum():,})"
    columns[title_of_band] = _mean_column(rows, _exact(splits, band), 1)
  return tables.column_table(title, rows, columns)


def _bands(
  rows: Rows, splits: Sequence[str], beyond: int, within: int = 1
) -> list[np.ndarray]:
  """Returns masks of the sentences in bands of length, each with about as many.

  `within` is the number of bands in the lengths of training, `beyond` that of longer
  ones.
  """
  first, found = _first(rows), []
  lengths, trained = (
    _sentences(first, splits)[:, 0],
    first["config"]["batches.max_length"] - 1,
  )
  for side, number in ((lengths <= trained, within), (lengths > trained, beyond)):
    ends = np.quantile(lengths[side], np.arange(1, number + 1) / number, method="lower")
    band_of = np.searchsorted(ends := np.unique(ends), lengths)
    found += [side & (band_of == band) for band in range(len(ends))]
  return found


def _exact(splits: Sequence[str], mask: Any = ...) -> Callable[[Record], float]:
  """Returns the percentage of sentences in a mask that match, or of graphs classified right."""
  return lambda run: 100 * _sentences(run, splits)[mask, -1].mean()


def _draw_exact(
  rows: Rows, ends: Mapping[str, Sequence[str]], picture: pathlib.Path
) -> str:
  """Draws exact matches over length for the rows with positions in both stacks."""
  rows = {row: runs for row, runs in rows.items() if not row.endswith(_ONLY)}
  mark = _first(rows)["config"]["batches.max_length"] - 0.5, "longest in training"
  panels, beyond = [], dict.fromkeys(rows, 0.0)
  for name, splits in ends.items():
    lengths, curves = _sentences(_first(rows), splits)[:, 0], {row: {} for row in rows}
    for band in _bands(rows, splits, beyond=8, within=4):
      for row, runs in rows.items():
        exact, x = [*map(_exact(splits, band), runs)], lengths[band].mean()
        curves[row][x] = exact
        beyond[row] += (x > mark[0]) * statistics.fmean(exact)
    panels.append(SpreadPanel(f"length in tokens, {name}", "exact (%)", curves, mark))
  faint = sorted(rows, key=lambda row: -beyond[row])[_NUM_BOLD:]
  spread_curves(panels, picture, title=_picture_title(rows), faint=faint)
  return f"![Exact matches over length: {picture.stem}]({picture.parent.name}/{picture.name})"


# Music
# --------------------------------------------------------------------------------------------


def _music(sweep: str, rows: Rows, folder: pathlib.Path) -> str:
  first = _first(rows)
  config, split = first["config"], next(iter(first["scores"]))
  facts = {f"pieces of {split}": len(of) for split, of in first["sentences"].items()}
  facts |= {
    name: config[f"model.{name}"] for name in ("num_layers", "width", "num_heads")
  }
  columns = _seed_columns(rows)
  for of in first["scores"]:
    columns[f"{of}, a token"] = _mean_column(
      rows, lambda run, of=of: run["scores"][of]["nll"], 3
    )
  is_positions = (
    sweep.partition("-")[0] == "positions"
  )  # where `relative` is another scheme
  if config["data.source"] == "chorales" and not is_positions:
    published = {row: str(nats) for row, nats in music.PUBLISHED.items()}
    columns["published (second hand), valid, a token"] = published
  # The fall of the loss in the first tenth of the updates would hide the rest.
  start = (
    max(step for runs in rows.values() for run in runs for step, *_ in run["curve"])
    / 10
  )
  picture = folder / f"{sweep}-learning.png"
  parts = [
    tables.column_table(sweep, rows, columns),
    _differences(f"{split}, a token", rows, lambda run: run["scores"][split]["nll"], 3),
    _draw_curves(rows, ["loss (nats per token)"], picture, start),
  ]
  return _section(rows, parts, facts)


# Graphs
# -------------------------------------------------------------------------------------------


def _with_guess(rows: Rows, *splits: str) -> dict[str, str]:
  """Returns the accuracy of each row, and of the most frequent class, which depends on the fold."""
  has_folds, majorities = _first(rows)["config"]["data.source"] == "tu", []
  for run in next(iter(rows.values()))[: None if has_folds else 1]:
    sizes = [len(run["sentences"][split]) for split in splits]
    shares = [run["scores"][split]["majority"] for split in splits]
    majorities.append(float(np.average(shares, weights=sizes)))
  return _mean_column(rows, _exact(splits), 1) | {
    _GUESS: tables.mean_and_interval(majorities, 1)
  }


def _chains(sweep: str, rows: Rows, folder: pathlib.Path) -> str:
  first, longest = _first(rows), graphs.LONGEST_TRAINED
  longer = [k for k in graphs.CTP if k > longest]
  longest_valid = _exact(["valid"], _sentences(first, ["valid"])[:, 0] == longest)
  columns = _seed_columns(rows) | {
    "valid": _with_guess(rows, "valid"),
    f"valid, {longest}": _mean_column(rows, longest_valid, 1),
    f"test, {longest}": _with_guess(rows, f"test_{longest}"),
    f"test, {longer[0]} to {longer[-1]}": _with_guess(
      rows, *(f"test_{k}" for k in longer)
    ),
  }
  by_length = {}
  for k, accuracy in graphs.CTP.items():
    name = f"{k} ({len(first['sentences'][f'test_{k}'])}; {_DISTINCT[k]})"
    by_length[name] = _with_guess(rows, f"test_{k}") | {graphs.NAME: f"{accuracy:.1f}"}
  scores = {
    row: {k: [*map(_exact([f"test_{k}"]), runs)] for k in graphs.CTP}
    for row, runs in rows.items()
  }
  picture = folder / f"{sweep}-lengths.png"
  graphs.draw_lengths(scores, picture, _picture_title(rows))
  parts = [
    tables.column_table(sweep, [*rows, _GUESS], columns),
    _differences(f"valid, {longest}", rows, longest_valid, is_paired=True),
    tables.column_table(
      "test, relations (graphs)", [*rows, graphs.NAME, _GUESS], by_length
    ),
    f"![Accuracy over length](graphs/{picture.name})",
  ]
  return _section(rows, parts, {})


def _folds(sweep: str, rows: Rows) -> str:
  config = _first(rows)["config"]
  columns = {"seeds": _seed_columns(rows)["seeds"]}
  columns |= {split: _with_guess(rows, split) for split in ("valid", "test")}
  title = f"{sweep}: {config['data.tu.name']}, {config['data.tu.num_folds']} folds"
  table = tables.column_table(title, [*rows, _GUESS], columns)
  differences = _differences("test", rows, _exact(["test"]), is_paired=True)
  return _section(rows, [table, differences], {})
