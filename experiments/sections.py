"""Tables and pictures of the sweeps of each task, from their records."""

import itertools
import json
import pathlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.errors import InputError
from experiments.evaluation.pictures import SpreadPanel, small_multiples, spread_curves
from experiments.evaluation.records import Record, Rows
from experiments.evaluation.tables import (
  format_interval,
  mean_and_interval,
  row_table,
  student_interval,
)
from experiments.graphs import scores as graphs
from experiments.music import scores as music
from experiments.training.environment import short_commit
from experiments.translation import scores as translation

# Shaw et al. 2018: Table 1 is on newstest2014, Tables 2 and 3 on newstest2013.
_PAPER = {
  "table1": {
    "paper, EN-DE base": {"relative": 26.8, "sinusoidal": 26.5},
    "paper, EN-DE big": {"relative": 29.2, "sinusoidal": 27.9},
    "paper, EN-FR base": {"relative": 38.7, "sinusoidal": 38.2},
    "paper, EN-FR big": {"relative": 41.5, "sinusoidal": 41.2},
  },
  "table2": {
    "paper, EN-DE base": {
      "k=0": 12.5,
      "k=1": 25.5,
      "k=2": 25.8,
      "k=4": 25.9,
      "k=16": 25.8,
      "k=64": 25.9,
      "k=256": 25.8,
    }
  },
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
_DISTINCT = {2: 2, 3: 7, 4: 36, 5: 185, 6: 105, 7: 155, 8: 135, 9: 124, 10: 122}
_GUESS = "most frequent class in training"
_MOST_PAIRED = 8  # rows in a table of all pairs
_MOST_BANDS = 6  # in a picture: more have a small one each

Table = dict[str, dict[str, object]]  # cells by row and column


def block_of(task: str, sweep: str, rows: Rows, folder: pathlib.Path) -> str:
  """Returns the section of a sweep for its page, and draws its picture in `folder`."""
  config = _first(rows)["config"]
  if task == "music":
    return _music(sweep, rows, folder)
  if task == "translation" and config["evaluation.given_lengths"]:
    return _lengths(sweep, rows, folder)
  if task == "translation":
    return _translation(sweep, rows, folder)
  if task == "graphs" and config["data.source"] == "clutrr":
    return _chains(sweep, rows, folder)
  if task == "graphs":
    return _folds(sweep, rows)
  raise InputError(f"no table for runs of {task}: add one to {__name__}.block_of")


# All tasks
# --------------------------------------------------------------------------------------


def _first(rows: Rows) -> Record:
  return next(iter(rows.values()))[0]


def _section(rows: Rows, parts: Sequence[str], facts: Mapping[str, object]) -> str:
  """Returns a sweep's section: its parts, what its rows differ in, how they were run."""
  facts = {**facts, **_run_facts(rows)}
  lines = [f"- {name}: {value}" for name, value in facts.items()]
  parts = [*parts, _config_table(rows), "\n".join(lines)]
  return "\n\n".join(filter(None, parts))


def _run_facts(rows: Rows) -> dict[str, str]:
  """Returns the budget, machine, code and versions of the runs."""
  runs = list(itertools.chain(*rows.values()))
  minutes = statistics.median(run["budget"]["minutes"] for run in runs)
  values: dict[str, set[str]] = defaultdict(set)
  for run in runs:
    budget, packages = run["budget"], run["packages"]
    averaged = len(run.get("checkpoints", ()))
    facts = {
      "updates": f"{budget['updates']:,}",
      "tokens or nodes per update": f"{budget['tokens_per_update']:,}",
      "minutes per run (median)": f"{minutes:.1f}",
      "checkpoints averaged": averaged or run["config"]["decoding.average_checkpoints"],
      "hardware": run["hardware"],
      "date": run["date"][:10],
      "commit": short_commit(run["commit"]),
      "python": packages["python"],
      "jax": packages.get("jax"),
      "flax": packages.get("flax"),
    }
    for name, value in facts.items():
      values[name].add(str(value))
  return {name: ", ".join(sorted(texts)) for name, texts in values.items()}


def _config_table(rows: Rows) -> str:
  """Returns a table of the config values, but for the seed, that differ between rows."""
  configs = {row: runs[0]["config"] for row, runs in rows.items()}
  table: Table = defaultdict(dict)
  for key in sorted(set().union(*configs.values()) - {"seed"}):
    cells = {}
    for row, config in configs.items():
      cells[row] = _format_value(config[key]) if key in config else "-"
    if len(set(cells.values())) > 1:
      for row, cell in cells.items():
        table[row][key] = cell
  return row_table("config", table) if table else ""


def _format_value(value: object) -> str:
  """Formats a value of a config; 0 and 0.0 are the same value."""
  is_word = isinstance(value, str) and value
  return f"`{value if is_word else json.dumps(value).removesuffix('.0')}`"


def _mean(runs: Sequence[Record], score: Callable, digits: int = 2) -> str:
  """Formats the mean of a score over the seeds, and its interval."""
  return mean_and_interval([*map(score, runs)], digits)


def _seeds(runs: Sequence[Record]) -> str:
  return ", ".join(str(run["seed"]) for run in runs)


def _last_loss(run: Record) -> float:
  return run["curve"][-1][1]


def _begin_table(rows: Rows) -> Table:
  """Returns the first columns of a sweep's table: seeds, and the last valid loss."""
  table: Table = defaultdict(dict)
  for row, runs in rows.items():
    table[row] = {"seeds": _seeds(runs), "valid loss": _mean(runs, _last_loss, 3)}
  return table


def _differences(
  title: str,
  rows: Rows,
  score: Callable[[Record], float],
  digits: int = 2,
  is_paired: bool = False,
) -> str:
  """Returns the table of differences between rows, if there are several.

  Runs that diverged are left out. More than 8 rows are compared with the first one only.
  """
  if len(rows) < 2:
    return ""
  scores = {row: _finite_scores(runs, score) for row, runs in rows.items()}
  others = [*rows] if len(rows) <= _MOST_PAIRED else [*rows][:1]
  table: Table = defaultdict(dict)
  for row, other in itertools.product(rows, others):
    cell = "-"
    if row != other:
      cell = _difference(scores[row], scores[other], digits, is_paired)
    table[row][other] = cell
  return row_table(f"{title}, row - column", table)


def _finite_scores(
  runs: Sequence[Record], score: Callable[[Record], float]
) -> dict[int, float]:
  """Returns the scores by seed."""
  scores = {}
  for run in runs:
    value = score(run)
    if np.isfinite(value):
      scores[run["seed"]] = value
  return scores


def _difference(
  scores: Mapping[int, float],
  others: Mapping[int, float],
  digits: int,
  is_paired: bool,
) -> str:
  """Formats the difference of two rows' scores by seed; a significant one (95%) is bold.

  If `is_paired`, the interval is that of the differences at the seeds that both have.
  Otherwise it is that of the difference of two means.
  """
  samples = [[*scores.values()], [*others.values()]]
  if is_paired:
    seeds = sorted(scores.keys() & others.keys())
    samples = [[scores[seed] - others[seed] for seed in seeds]]
  if not all(samples):
    return "-"
  interval = student_interval(*samples)
  text = format_interval(interval, digits, sign="+")
  mean, half_width = interval
  if half_width is None or abs(mean) <= half_width:
    return text
  return f"**{text}**"


def _picture_title(rows: Rows) -> str:
  """Names the data and the number of seeds."""
  source = _first(rows)["config"]["data.source"]
  counts = [len(runs) for runs in rows.values()]
  fewest, most = min(counts), max(counts)
  if most == 1:
    return f"{source}, 1 seed"
  seeds = most if fewest == most else f"{fewest} to {most}"
  return f"{source}, {seeds} seeds: mean, lowest to highest"


def _link(caption: str, picture: pathlib.Path) -> str:
  return f"![{caption}]({picture.parent.name}/{picture.name})"


def _draw_curves(
  sweep: str, rows: Rows, measures: list[str], folder: pathlib.Path, start: float = 0
) -> str:
  """Draws the measures, columns of the curves, over updates; returns their line of a page.

  If there are many rows, draws the last of the measures alone.
  """
  panels = []
  for column, measure in enumerate(measures, start=1):
    curves = {row: _curve(runs, column, start) for row, runs in rows.items()}
    steps = sorted(set().union(*curves.values()))
    panel = SpreadPanel("updates", f"validation {measure}", curves, ticks=steps)
    panels.append(panel)
  picture, title = folder / f"{sweep}-learning.png", _picture_title(rows)
  if len(rows) > _MOST_BANDS:
    small_multiples(panels[-1], picture, title=title)
  else:
    spread_curves(panels, picture, title=title)
  return _link(f"Learning curves: {sweep}", picture)


def _curve(
  runs: Sequence[Record], column: int, start: float
) -> dict[float, list[float]]:
  """Returns the values of a column of the runs' curves by step."""
  values: dict[float, list[float]] = defaultdict(list)
  for run in runs:
    for line in run["curve"]:
      step, value = line[0], line[column]
      if step >= start and value is not None:
        values[step].append(value)
  return dict(sorted(values.items()))


# Translation
# --------------------------------------------------------------------------------------


def _translation(sweep: str, rows: Rows, folder: pathlib.Path) -> str:
  first = _first(rows)
  config, splits = first["config"], list(first["scores"])
  if "test" in splits:
    splits.remove("test")
    splits.insert(0, "test")
  table = _begin_table(rows)
  scores = _find_scores(rows, splits)
  published = _PAPER.get(sweep.partition("-")[0], {})
  for row, cells in table.items():
    for name, (split, kind) in scores.items():
      cells[name] = _mean(rows[row], lambda run: run["scores"][split][kind])  # noqa: B023
    for name, bleu in published.items():
      cells[name] = bleu.get(row, "-")
  facts = {"data": f"{config['data.source']} {config['data.languages']}"}
  for split, sentences in first["sentences"].items():
    facts[f"sentences of {split}"] = f"{len(sentences):,}"
  main_split = splits[0]
  signatures = first["scores"][main_split]["signatures"]
  facts["sacreBLEU"] = signatures["sacrebleu"]
  facts["paper's BLEU"] = signatures["paper_bleu"]
  title = f"sacreBLEU of {main_split}"
  differences = _differences(
    title, rows, lambda run: run["scores"][main_split]["sacrebleu"]
  )
  curves = _draw_curves(sweep, rows, ["loss (nats per token)", "BLEU"], folder)
  return _section(rows, [row_table(sweep, table), differences, curves], facts)


def _find_scores(rows: Rows, splits: Sequence[str]) -> dict[str, tuple[str, str]]:
  """Returns the split and kind of each column: the scores that no run lacks, as old ones do.

  The paper's BLEU is shown for the first split alone.
  """
  columns = {}
  for kind, title in translation.TITLES.items():
    for split in splits[:1] if kind == "paper_bleu" else splits:
      if all(kind in run["scores"][split] for run in itertools.chain(*rows.values())):
        columns[title if split == splits[0] else f"{title}, {split}"] = split, kind
  return columns


def _sentences(run: Record, splits: Sequence[str]) -> np.ndarray:
  return np.concatenate([run["sentences"][split] for split in splits])


# Valid exact matches (%) at whose first evaluation schemes are compared, by source of
# the data.
_LEVELS = {"scan": 90, "embedded": 50}
_ONLY = " only"  # ends the name of a row with positions in one stack alone
_NUM_BOLD = 5  # curves of a picture, the best beyond the lengths of training


def _lengths(sweep: str, rows: Rows, folder: pathlib.Path) -> str:
  """Returns exact matches at equal valid scores, and at the end by length."""
  first = _first(rows)
  source = first["config"]["data.source"]
  splits: dict[str, list[str]] = {"EOS free": [], "length given": []}
  facts = {}
  for split in first["scores"]:
    if split.endswith(translation.GIVEN):
      splits["length given"].append(split)
    else:
      splits["EOS free"].append(split)
      facts[f"sentences of {split}"] = f"{len(first['sentences'][split]):,}"
  facts["data"] = source
  parts = [_at_level(sweep, rows, _LEVELS[source])]
  for end, of_end in splits.items():
    parts.append(_exact_by_length(f"{sweep}: {end}", rows, of_end))
  parts.append(_draw_exact(rows, splits, folder / f"{sweep}.png"))
  return _section(rows, parts, facts)


def _at_level(sweep: str, rows: Rows, level: float) -> str:
  """Returns the table of exact matches at the first step whose valid ones reach a level."""
  table: Table = {}
  for row, runs in rows.items():
    reached = [exact for exact in (_exact_at(run, level) for run in runs) if exact]
    cells = {"seeds": _seeds(runs), "reached": f"{len(reached)} of {len(runs)}"}
    for name in reached[0] if reached else ():
      values = [exact[name] for exact in reached]
      cells[name] = mean_and_interval(values, 0 if name == "updates" else 1)
    table[row] = cells
  return row_table(f"{sweep}: valid first at {level}%", table)


def _exact_at(run: Record, level: float) -> dict[str, float]:
  """Returns the first step whose valid exact matches reach a level, and all at it."""
  for step, valid in run["exact"]["valid"]:
    if valid >= level:
      exact = {split: dict(curve)[step] for split, curve in run["exact"].items()}
      return {"updates": float(step), **exact}
  return {}


def _exact_by_length(title: str, rows: Rows, splits: Sequence[str]) -> str:
  """Returns the table of the exact matches (%) at the end, by length in tokens."""
  lengths = _sentences(_first(rows), splits)[:, 0]
  trained, *longer = _bands(rows, splits, num_trained=1, num_longer=4)
  table: Table = {}
  for row, runs in rows.items():
    cells = table[row] = {}
    cells["valid"] = _mean(runs, lambda run: run["exact"]["valid"][-1][1], 1)
    for band in (trained, *longer, ~trained):
      inside = lengths[band]
      name = f"{inside.min()} to {inside.max()} ({len(inside):,})"
      cells[name] = _mean(runs, _accuracy(splits, band), 1)
  return row_table(title, table)


def _bands(
  rows: Rows, splits: Sequence[str], num_trained: int, num_longer: int
) -> list[np.ndarray]:
  """Returns masks of the sentences in bands of length, each with about as many.

  The first bands are in the lengths of training, the others are longer.
  """
  first, bands = _first(rows), []
  lengths = _sentences(first, splits)[:, 0]
  is_longer = lengths >= first["config"]["batches.max_length"]  # EOS is a token of it
  for side, number in ((~is_longer, num_trained), (is_longer, num_longer)):
    shares = np.arange(1, number + 1) / number
    ends = np.unique(np.quantile(lengths[side], shares, method="lower"))
    band_of = np.searchsorted(ends, lengths)
    bands += [side & (band_of == band) for band in range(len(ends))]
  return bands


def _accuracy(splits: Sequence[str], mask: Any = ...) -> Callable[[Record], float]:
  """Returns a run's percentage of sentences that match, or of graphs classified right."""
  return lambda run: 100 * _sentences(run, splits)[mask, -1].mean()


def _draw_exact(
  rows: Rows, splits: Mapping[str, Sequence[str]], picture: pathlib.Path
) -> str:
  """Draws exact matches over length for the rows with positions in both stacks."""
  rows = {row: runs for row, runs in rows.items() if not row.endswith(_ONLY)}
  longest = _first(rows)["config"]["batches.max_length"] - 0.5
  panels, beyond = [], dict.fromkeys(rows, 0.0)
  for end, of_end in splits.items():
    lengths = _sentences(_first(rows), of_end)[:, 0]
    curves: dict[str, dict[float, list[float]]] = defaultdict(dict)
    for band in _bands(rows, of_end, num_trained=4, num_longer=8):
      length = lengths[band].mean()
      for row, runs in rows.items():
        exact = [*map(_accuracy(of_end, band), runs)]
        curves[row][length] = exact
        beyond[row] += (length > longest) * statistics.fmean(exact)
    mark = longest, "longest in training"
    panels.append(SpreadPanel(f"length in tokens, {end}", "exact (%)", curves, mark))
  faint = sorted(rows, key=lambda row: -beyond[row])[_NUM_BOLD:]
  spread_curves(panels, picture, title=_picture_title(rows), faint=faint)
  return _link(f"Exact matches over length: {picture.stem}", picture)


# Music
# --------------------------------------------------------------------------------------


def _music(sweep: str, rows: Rows, folder: pathlib.Path) -> str:
  first = _first(rows)
  config, main_split = first["config"], next(iter(first["scores"]))
  facts = {f"pieces of {split}": len(of) for split, of in first["sentences"].items()}
  for name in ("num_layers", "width", "num_heads"):
    facts[name] = config[f"model.{name}"]
  # In a sweep of positions `relative` is another scheme.
  is_positions = sweep.startswith("positions")
  has_published = config["data.source"] == "chorales" and not is_positions
  table = _begin_table(rows)
  for row, cells in table.items():
    for split in first["scores"]:
      cells[f"{split}, a token"] = _mean(rows[row], _likelihood(split), 3)
    if has_published:
      nats = music.PUBLISHED.get(row, "-")
      cells["published (second hand), valid, a token"] = nats
  # The fall of the loss in the first tenth of the updates would hide the rest.
  start = first["budget"]["updates"] / 10
  title = f"{main_split}, a token"
  differences = _differences(title, rows, _likelihood(main_split), 3)
  curves = _draw_curves(sweep, rows, ["loss (nats per token)"], folder, start)
  return _section(rows, [row_table(sweep, table), differences, curves], facts)


def _likelihood(split: str) -> Callable[[Record], float]:
  """Returns a run's negative log likelihood of a split, in nats a token."""
  return lambda run: run["scores"][split]["nll"]


# Graphs
# --------------------------------------------------------------------------------------


def _add_accuracy(table: Table, name: str, rows: Rows, *splits: str) -> None:
  """Adds a column: the accuracy of each row, and of the most frequent class."""
  for row, runs in rows.items():
    table[row][name] = _mean(runs, _accuracy(splits), 1)
  runs = next(iter(rows.values()))
  if runs[0]["config"]["data.source"] != "tu":
    runs = runs[:1]  # only a fold, which is a seed, has its own most frequent class
  guesses = []
  for run in runs:
    sizes = [len(run["sentences"][split]) for split in splits]
    shares = [run["scores"][split]["majority"] for split in splits]
    guesses.append(float(np.average(shares, weights=sizes)))
  table[_GUESS][name] = mean_and_interval(guesses, 1)


def _chains(sweep: str, rows: Rows, folder: pathlib.Path) -> str:
  sentences, longest = _first(rows)["sentences"], graphs.LONGEST_TRAINED
  is_longest = np.array(sentences["valid"])[:, 0] == longest
  of_longest = _accuracy(["valid"], is_longest)
  longer = {k: f"test_{k}" for k in graphs.CTP if k > longest}
  table = _begin_table(rows)
  _add_accuracy(table, "valid", rows, "valid")
  for row, runs in rows.items():
    table[row][f"valid, {longest}"] = _mean(runs, of_longest, 1)
  _add_accuracy(table, f"test, {longest}", rows, f"test_{longest}")
  name = f"test, {min(longer)} to {max(longer)}"
  _add_accuracy(table, name, rows, *longer.values())
  by_length: Table = {row: {} for row in (*rows, graphs.NAME, _GUESS)}
  curves: dict[str, dict[int, list[float]]] = defaultdict(dict)
  for k, published in graphs.CTP.items():
    test = f"test_{k}"
    name = f"{k} ({len(sentences[test])}; {_DISTINCT[k]})"
    _add_accuracy(by_length, name, rows, test)
    by_length[graphs.NAME][name] = published
    for row, runs in rows.items():
      curves[row][k] = [*map(_accuracy([test]), runs)]
  picture = folder / f"{sweep}-lengths.png"
  graphs.draw_lengths(curves, picture, _picture_title(rows))
  differences = _differences(f"valid, {longest}", rows, of_longest, is_paired=True)
  parts = [
    row_table(sweep, table),
    differences,
    row_table("test, relations (graphs)", by_length),
    _link("Accuracy over length", picture),
  ]
  return _section(rows, parts, {})


def _folds(sweep: str, rows: Rows) -> str:
  config = _first(rows)["config"]
  table: Table = defaultdict(dict)
  for row, runs in rows.items():
    table[row]["seeds"] = _seeds(runs)
  for split in ("valid", "test"):
    _add_accuracy(table, split, rows, split)
  title = f"{sweep}: {config['data.tu.name']}, {config['data.tu.num_folds']} folds"
  differences = _differences("test", rows, _accuracy(["test"]), is_paired=True)
  return _section(rows, [row_table(title, table), differences], {})
