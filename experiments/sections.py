"""Writes the section of each sweep: its tables and pictures, from its records."""

import itertools
import json
import pathlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.errors import InputError
from experiments.evaluation.pictures import SpreadPanel, spread_curves
from experiments.evaluation.records import Record, Records
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
# The number of distinct graphs in each test split of CLUTRR, by length.
_DISTINCT = {2: 2, 3: 7, 4: 36, 5: 185, 6: 105, 7: 155, 8: 135, 9: 124, 10: 122}
_GUESS = "most frequent class in training"
_MOST_PAIRED = 8  # configurations in a table of all pairs: more are too wide
_MOST_SHADED = 6  # curves with spread in one picture: more hide each other

Table = dict[str, dict[str, object]]  # cells by configuration and column


def make_section(task: str, sweep: str, records: Records, folder: pathlib.Path) -> str:
  """Returns a sweep's section of the results page; draws its picture in `folder`."""
  config = _first(records)["config"]
  if task == "music":
    return _describe_music(sweep, records, folder)
  if task == "translation" and config["evaluation.given_lengths"]:
    return _describe_lengths(sweep, records, folder)
  if task == "translation":
    return _describe_translation(sweep, records, folder)
  if task == "graphs" and config["data.source"] == "clutrr":
    return _describe_chains(sweep, records, folder)
  if task == "graphs":
    return _describe_folds(sweep, records)
  if task == "length_tasks":
    return _describe_task(sweep, records, folder)
  raise InputError(f"no table for runs of {task}: add one to {__name__}.make_section")


# All tasks
# --------------------------------------------------------------------------------------


def _first(records: Records) -> Record:
  return next(iter(records.values()))[0]


def _join_parts(
  records: Records, parts: Sequence[str], facts: Mapping[str, object]
) -> str:
  """Joins a sweep's tables with a table of its configs, and facts about its runs."""
  facts = {**facts, **_collect_facts(records)}
  lines = [f"- {name}: {value}" for name, value in facts.items()]
  parts = [*parts, _tabulate_configs(records), "\n".join(lines)]
  return "\n\n".join(filter(None, parts))


def _collect_facts(records: Records) -> dict[str, str]:
  """Collects the budget, machine, code and versions of the runs."""
  runs = list(itertools.chain(*records.values()))
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


def _tabulate_configs(records: Records) -> str:
  """Tabulates the config values that differ between configurations, except the seed."""
  configs = {name: runs[0]["config"] for name, runs in records.items()}
  first = next(iter(configs.values()))
  table: Table = defaultdict(dict)
  for key in sorted(first.keys() - {"seed"}):
    if any(config.get(key) != first[key] for config in configs.values()):
      for configuration, config in configs.items():
        table[configuration][key] = _format_value(config.get(key))
  return row_table("config", table) if table else ""


def _format_value(value: object) -> str:
  """Formats a value of a config; 0 and 0.0 look the same."""
  is_word = isinstance(value, str) and value
  return f"`{value if is_word else json.dumps(value).removesuffix('.0')}`"


def _add_column(
  table: Table,
  name: str,
  records: Records,
  score: Callable[[Record], float],
  digits: int = 2,
) -> None:
  """Adds a column: the mean of a score over the seeds, with its interval."""
  for configuration, runs in records.items():
    table[configuration][name] = mean_and_interval([*map(score, runs)], digits)


def _score(split: str, kind: str) -> Callable[[Record], float]:
  """Makes a function that returns a score of a run."""
  return lambda run: run["scores"][split][kind]


def _list_seeds(runs: Sequence[Record]) -> str:
  return ", ".join(str(run["seed"]) for run in runs)


def _last_loss(run: Record) -> float:
  return run["curve"][-1][1]


def _begin_table(records: Records) -> Table:
  """Returns the first columns of a sweep's table: seeds and last validation loss."""
  table: Table = defaultdict(dict)
  for configuration, runs in records.items():
    table[configuration]["seeds"] = _list_seeds(runs)
  _add_column(table, "valid loss", records, _last_loss, 3)
  return table


def _tabulate_differences(
  title: str,
  records: Records,
  score: Callable[[Record], float],
  digits: int = 2,
  is_paired: bool = False,
) -> str:
  """Tabulates the differences between configurations, if there are several.

  Runs that diverged are left out. More than 8 configurations are only compared with the
  first one.
  """
  if len(records) < 2:
    return ""
  scores = {name: _finite_scores(runs, score) for name, runs in records.items()}
  others = [*records] if len(records) <= _MOST_PAIRED else [*records][:1]
  table: Table = defaultdict(dict)
  for configuration, other in itertools.product(records, others):
    cell = "-"
    if configuration != other:
      cell = _format_difference(scores[configuration], scores[other], digits, is_paired)
    table[configuration][other] = cell
  return row_table(f"{title}, row - column", table)


def _finite_scores(
  runs: Sequence[Record], score: Callable[[Record], float]
) -> dict[int, float]:
  """Returns the finite scores by seed."""
  scores = {}
  for run in runs:
    value = score(run)
    if np.isfinite(value):
      scores[run["seed"]] = value
  return scores


def _format_difference(
  scores: Mapping[int, float],
  others: Mapping[int, float],
  digits: int,
  is_paired: bool,
) -> str:
  """Formats the difference of two configurations; bold if it is significant (95%).

  Both scores are by seed. If `is_paired`, the interval is of the differences at common
  seeds. Otherwise it is of the difference of two means.
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


def _draw_panels(
  panels: Sequence[SpreadPanel], records: Records, picture: pathlib.Path
) -> None:
  """Draws panels with their spread; without it if the curves are many."""
  title = _title_picture(records)
  if len(records) > _MOST_SHADED:
    title, _, _ = title.partition(":")
  spread_curves(panels, picture, title, has_bands=len(records) <= _MOST_SHADED)


def _title_picture(records: Records) -> str:
  """Makes a picture's title: the data and the number of seeds."""
  source = _first(records)["config"]["data.source"]
  counts = [len(runs) for runs in records.values()]
  fewest, most = min(counts), max(counts)
  if most == 1:
    return f"{source}, 1 seed"
  seeds = most if fewest == most else f"{fewest} to {most}"
  return f"{source}, {seeds} seeds: mean, lowest to highest"


def _link(caption: str, picture: pathlib.Path) -> str:
  return f"![{caption}]({picture.parent.name}/{picture.name})"


def _draw_curves(
  sweep: str,
  records: Records,
  measures: list[str],
  folder: pathlib.Path,
  start: float = 0,
) -> str:
  """Draws measures over updates; returns a line of Markdown with the picture.

  The measures are columns of the records' curves. With many configurations, only the
  last measure is drawn.
  """
  panels = []
  for column, measure in enumerate(measures, start=1):
    curves = {}
    for configuration, runs in records.items():
      curves[configuration] = _collect_values(runs, column, start)
    steps = sorted(set().union(*curves.values()))
    panel = SpreadPanel("updates", f"validation {measure}", curves, ticks=steps)
    panels.append(panel)
  if len(records) > _MOST_SHADED:
    panels = panels[-1:]
  picture = folder / f"{sweep}-learning.png"
  _draw_panels(panels, records, picture)
  return _link(f"Learning curves: {sweep}", picture)


def _collect_values(
  runs: Sequence[Record], column: int, start: float
) -> dict[float, list[float]]:
  """Collects a column of the runs' curves; returns its values by step."""
  values: dict[float, list[float]] = defaultdict(list)
  for run in runs:
    for line in run["curve"]:
      step, value = line[0], line[column]
      if step >= start and value is not None:
        values[step].append(value)
  return dict(sorted(values.items()))


# Translation
# --------------------------------------------------------------------------------------


def _describe_translation(sweep: str, records: Records, folder: pathlib.Path) -> str:
  first = _first(records)
  config, splits = first["config"], list(first["scores"])
  if "test" in splits:
    splits.remove("test")
    splits.insert(0, "test")
  table = _begin_table(records)
  scores = _find_scores(records, splits)
  published = _PAPER.get(sweep.partition("-")[0], {})
  for name, (split, kind) in scores.items():
    _add_column(table, name, records, _score(split, kind))
  for name, bleu in published.items():
    for configuration, cells in table.items():
      cells[name] = bleu.get(configuration, "-")
  facts = {"data": f"{config['data.source']} {config['data.languages']}"}
  for split, sentences in first["sentences"].items():
    facts[f"sentences of {split}"] = f"{len(sentences):,}"
  main_split = splits[0]
  signatures = first["scores"][main_split]["signatures"]
  facts["sacreBLEU"] = signatures["sacrebleu"]
  facts["paper's BLEU"] = signatures["paper_bleu"]
  title, score = f"sacreBLEU of {main_split}", _score(main_split, "sacrebleu")
  differences = _tabulate_differences(title, records, score)
  curves = _draw_curves(sweep, records, ["loss (nats per token)", "BLEU"], folder)
  return _join_parts(records, [row_table(sweep, table), differences, curves], facts)


def _find_scores(records: Records, splits: Sequence[str]) -> dict[str, tuple[str, str]]:
  """Returns the split and kind of score of each column, by its title.

  Scores that an old record lacks are left out. The paper's BLEU is only shown for the
  first split.
  """
  runs = list(itertools.chain(*records.values()))
  columns = {}
  for kind, title in translation.TITLES.items():
    for split in splits[:1] if kind == "paper_bleu" else splits:
      name = title if split == splits[0] else f"{title}, {split}"
      if all(kind in run["scores"][split] for run in runs):
        columns[name] = split, kind
  return columns


def _join_sentences(run: Record, splits: Sequence[str]) -> np.ndarray:
  return np.concatenate([run["sentences"][split] for split in splits])


# Schemes are compared when their exact matches on validation (%) first reach this
# level, by source of the data: at equal quality on short sequences, longer ones tell
# them apart.
_LEVELS = {"scan": 90, "embedded": 50}
_ONLY = " only"  # ends the names of configurations with positions in one stack


def _describe_lengths(sweep: str, records: Records, folder: pathlib.Path) -> str:
  """Tabulates exact matches at equal validation scores, and at the end by length."""
  first = _first(records)
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
  parts = [_compare_at_level(sweep, records, _LEVELS[source])]
  for end, end_splits in splits.items():
    parts.append(_tabulate_lengths(f"{sweep}: {end}", records, end_splits))
  parts.append(_draw_exact(records, splits, folder / f"{sweep}.png"))
  return _join_parts(records, parts, facts)


def _compare_at_level(sweep: str, records: Records, level: float) -> str:
  """Tabulates exact matches when validation first reaches a level."""
  table: Table = {}
  for configuration, runs in records.items():
    reached = list(filter(None, (_find_level(run, level) for run in runs)))
    cells = {"seeds": _list_seeds(runs), "reached": f"{len(reached)} of {len(runs)}"}
    for name in reached[0] if reached else ():
      values = [exact[name] for exact in reached]
      cells[name] = mean_and_interval(values, 0 if name == "updates" else 1)
    table[configuration] = cells
  return row_table(f"{sweep}: valid first at {level}%", table)


def _find_level(run: Record, level: float) -> dict[str, float]:
  """Returns the step at which validation first reaches a level, and its matches."""
  for step, valid in run["exact"]["valid"]:
    if valid >= level:
      exact = {split: dict(curve)[step] for split, curve in run["exact"].items()}
      return {"updates": float(step), **exact}
  return {}


def _tabulate_lengths(title: str, records: Records, splits: Sequence[str]) -> str:
  """Tabulates the exact matches (%) at the end, by length in tokens."""
  lengths = _join_sentences(_first(records), splits)[:, 0]
  trained, *longer = _bin_lengths(records, splits, num_trained=1, num_longer=4)
  table: Table = defaultdict(dict)
  _add_column(table, "valid", records, lambda run: run["exact"]["valid"][-1][1], 1)
  for inside in (trained, *longer, ~trained):
    binned = lengths[inside]
    name = f"{binned.min()} to {binned.max()} ({len(binned):,})"
    _add_column(table, name, records, _accuracy(splits, inside), 1)
  return row_table(title, table)


def _bin_lengths(
  records: Records, splits: Sequence[str], num_trained: int, num_longer: int
) -> list[np.ndarray]:
  """Divides the sentences into bins of length; returns a mask for each bin.

  The first bins hold the lengths of training, the others longer ones. The bins of each
  kind have about equally many sentences.
  """
  first, bins = _first(records), []
  lengths = _join_sentences(first, splits)[:, 0]
  is_longer = (
    lengths >= first["config"]["batches.max_length"]
  )  # max_length includes EOS
  for side, num_bins in ((~is_longer, num_trained), (is_longer, num_longer)):
    shares = np.arange(1, num_bins + 1) / num_bins
    ends = np.unique(np.quantile(lengths[side], shares, method="lower"))
    bin_index = np.searchsorted(ends, lengths)
    bins += [side & (bin_index == number) for number in range(len(ends))]
  return bins


def _accuracy(splits: Sequence[str], mask: Any = ...) -> Callable[[Record], float]:
  """Makes a score: the percentage of exact sentences or correct graphs."""
  return lambda run: 100 * _join_sentences(run, splits)[mask, -1].mean()


def _draw_exact(
  records: Records, splits: Mapping[str, Sequence[str]], picture: pathlib.Path
) -> str:
  """Draws exact matches over length, without runs with positions in one stack only."""
  records = {name: runs for name, runs in records.items() if not name.endswith(_ONLY)}
  mark = _first(records)["config"]["batches.max_length"] - 0.5, "longest in training"
  panels = []
  for end, end_splits in splits.items():
    lengths = _join_sentences(_first(records), end_splits)[:, 0]
    curves: dict[str, dict[float, list[float]]] = defaultdict(dict)
    for inside in _bin_lengths(records, end_splits, num_trained=4, num_longer=8):
      score = _accuracy(end_splits, inside)
      for configuration, runs in records.items():
        curves[configuration][lengths[inside].mean()] = [*map(score, runs)]
    panels.append(SpreadPanel(f"length in tokens, {end}", "exact (%)", curves, mark))
  _draw_panels(panels, records, picture)
  return _link(f"Exact matches over length: {picture.stem}", picture)


# Music
# --------------------------------------------------------------------------------------


def _describe_music(sweep: str, records: Records, folder: pathlib.Path) -> str:
  first = _first(records)
  config, main_split = first["config"], next(iter(first["scores"]))
  facts = {}
  for split, rows in first["sentences"].items():
    facts[f"pieces of {split}"] = len(rows)
  for name in ("num_layers", "width", "num_heads"):
    facts[name] = config[f"model.{name}"]
  # In a sweep of positions, the name `relative` means another scheme.
  is_positions = sweep.startswith("positions")
  has_published = config["data.source"] == "chorales" and not is_positions
  table = _begin_table(records)
  for split in first["scores"]:
    _add_column(table, f"{split}, a token", records, _score(split, "nll"), 3)
  if has_published:
    for configuration, cells in table.items():
      nats = music.PUBLISHED.get(configuration, "-")
      cells["published (second hand), valid, a token"] = nats
  # The loss falls so far in the first tenth of the updates that it would hide the rest.
  start = first["budget"]["updates"] / 10
  title, score = f"{main_split}, a token", _score(main_split, "nll")
  differences = _tabulate_differences(title, records, score, 3)
  curves = _draw_curves(sweep, records, ["loss (nats per token)"], folder, start)
  return _join_parts(records, [row_table(sweep, table), differences, curves], facts)


# Graphs
# --------------------------------------------------------------------------------------


def _add_accuracy(table: Table, name: str, records: Records, *splits: str) -> None:
  """Adds a column with the accuracy of each configuration and of the majority class."""
  _add_column(table, name, records, _accuracy(splits), 1)
  runs = next(iter(records.values()))
  if runs[0]["config"]["data.source"] != "tu":
    runs = runs[:1]  # seeds of `tu` are folds: only these differ in the majority class
  guesses = []
  for run in runs:
    total = num_graphs = 0
    for split in splits:
      size = len(run["sentences"][split])
      total += size * run["scores"][split]["majority"]
      num_graphs += size
    guesses.append(total / num_graphs)
  table[_GUESS][name] = mean_and_interval(guesses, 1)


def _describe_chains(sweep: str, records: Records, folder: pathlib.Path) -> str:
  sentences, longest = _first(records)["sentences"], graphs.LONGEST_TRAINED
  is_longest = np.array(sentences["valid"])[:, 0] == longest
  longest_accuracy = _accuracy(["valid"], is_longest)
  longer = {k: f"test_{k}" for k in graphs.CTP if k > longest}
  table = _begin_table(records)
  _add_accuracy(table, "valid", records, "valid")
  _add_column(table, f"valid, {longest}", records, longest_accuracy, 1)
  _add_accuracy(table, f"test, {longest}", records, f"test_{longest}")
  name = f"test, {min(longer)} to {max(longer)}"
  _add_accuracy(table, name, records, *longer.values())
  by_length: Table = {row: {} for row in (*records, graphs.NAME, _GUESS)}
  curves: dict[str, dict[int, list[float]]] = defaultdict(dict)
  for k, published in graphs.CTP.items():
    test = f"test_{k}"
    name = f"{k} ({len(sentences[test])}; {_DISTINCT[k]})"
    _add_accuracy(by_length, name, records, test)
    by_length[graphs.NAME][name] = published
    for configuration, runs in records.items():
      curves[configuration][k] = [*map(_accuracy([test]), runs)]
  picture = folder / f"{sweep}-lengths.png"
  graphs.draw_lengths(curves, picture, _title_picture(records))
  differences = _tabulate_differences(
    f"valid, {longest}", records, longest_accuracy, is_paired=True
  )
  parts = [
    row_table(sweep, table),
    differences,
    row_table("test, relations (graphs)", by_length),
    _link("Accuracy over length", picture),
  ]
  return _join_parts(records, parts, {})


def _describe_folds(sweep: str, records: Records) -> str:
  config = _first(records)["config"]
  table: Table = defaultdict(dict)
  for configuration, runs in records.items():
    table[configuration]["seeds"] = _list_seeds(runs)
  for split in ("valid", "test"):
    _add_accuracy(table, split, records, split)
  title = f"{sweep}: {config['data.tu.name']}, {config['data.tu.num_folds']} folds"
  differences = _tabulate_differences(
    "test", records, _accuracy(["test"]), is_paired=True
  )
  return _join_parts(records, [row_table(title, table), differences], {})


# Length tasks
# --------------------------------------------------------------------------------------

_RANDOM = ", random"  # ends the names of configurations with random positions
_BANDS = (41, 101, 201, 501)  # first lengths of the columns, and the end


def compare_tasks(sweeps: Mapping[str, Records]) -> str:
  """Tabulates the accuracy on longer inputs of each configuration and task."""
  table: Table = defaultdict(dict)
  for sweep, records in sweeps.items():
    _add_column(table, sweep, records, _score("longer", "accuracy"), 1)
  return row_table("accuracy (%), lengths 41 to 500", table)


def _describe_task(sweep: str, records: Records, folder: pathlib.Path) -> str:
  """Tabulates accuracy by length, and what random positions change."""
  table = _begin_table(records)
  _add_column(table, "1 to 40", records, _score("within", "accuracy"), 1)
  lengths = _join_sentences(_first(records), ["longer"])[:, 0]
  for first, end in itertools.pairwise(_BANDS):
    band = (first <= lengths) & (lengths < end)
    score = _accuracy(["longer"], band)
    _add_column(table, f"{first} to {end - 1}", records, score, 1)
  longer = _score("longer", "accuracy")
  _add_column(table, "41 to 500", records, longer, 1)
  scores = {name: _finite_scores(runs, longer) for name, runs in records.items()}
  for scheme in records:
    drawn = scores.get(scheme + _RANDOM)
    if drawn:
      difference = _format_difference(drawn, scores[scheme], 1, is_paired=False)
      table[scheme + _RANDOM]["random - plain"] = difference
  parts = [row_table(f"{sweep}: accuracy (%)", table)]
  parts.append(_draw_tasks(records, folder / f"{sweep}.png"))
  facts = {"task": _first(records)["config"]["data.source"]}
  return _join_parts(records, parts, facts)


def _draw_tasks(records: Records, picture: pathlib.Path) -> str:
  """Draws accuracy over length, with plain and with random positions."""
  panels = []
  for title in ("plain", "random"):
    curves = {}
    for configuration, runs in records.items():
      if configuration.endswith(_RANDOM) == (title == "random"):
        curves[configuration.removesuffix(_RANDOM)] = _collect_lengths(runs)
    mark = 40.5, "longest in training"
    axis = f"length of the input, {title} positions"
    panels.append(SpreadPanel(axis, "accuracy (%)", curves, mark))
  _draw_panels(panels, records, picture)
  return _link(f"Accuracy over length: {picture.stem}", picture)


def _collect_lengths(runs: Sequence[Record]) -> dict[float, list[float]]:
  """Collects accuracies by length, each the mean of about five lengths."""
  splits = "within", "longer"
  lengths = _join_sentences(runs[0], splits)[:, 0]
  values: dict[float, list[float]] = {}
  for part in np.array_split(np.unique(lengths), 18):
    score = _accuracy(splits, np.isin(lengths, part))
    values[float(part.mean())] = [*map(score, runs)]
  return values
