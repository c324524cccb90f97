"""Writes the section of each sweep: its tables and pictures, from its records."""

import itertools
import json
import math
import pathlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.errors import InputError
from experiments.evaluation.pictures import MOST_SHADED, SpreadPanel, spread_curves
from experiments.evaluation.records import Record, Records
from experiments.evaluation.tables import (
  column_table,
  format_difference,
  mean_and_interval,
)
from experiments.graphs import scores as graphs
from experiments.music import scores as music
from experiments.training.environment import short_commit
from experiments.translation import scores as translation

# Shaw et al. 2018: Table 1 is on newstest2014, Tables 2 and 3 on newstest2013.
_TABLE_1 = {
  "paper, EN-DE base": {"relative": 26.8, "sinusoidal": 26.5},
  "paper, EN-DE big": {"relative": 29.2, "sinusoidal": 27.9},
  "paper, EN-FR base": {"relative": 38.7, "sinusoidal": 38.2},
  "paper, EN-FR big": {"relative": 41.5, "sinusoidal": 41.2},
}
_TABLE_2 = {
  "k=0": 12.5,
  "k=1": 25.5,
  "k=2": 25.8,
  "k=4": 25.9,
  "k=16": 25.8,
  "k=64": 25.9,
  "k=256": 25.8,
}
_TABLE_3 = {"keys and values": 25.8, "keys": 25.8, "values": 25.3, "neither": 12.5}
_PAPER = {
  "table1": _TABLE_1,
  "table2": {"paper, EN-DE base": _TABLE_2},
  "table3": {"paper, EN-DE base": _TABLE_3},
}
# The number of distinct graphs in each test split of CLUTRR, by length.
_DISTINCT = {2: 2, 3: 7, 4: 36, 5: 185, 6: 105, 7: 155, 8: 135, 9: 124, 10: 122}
_GUESS = "most frequent class in training"
_MOST_PAIRED = 8  # configurations in a table of all pairs: more are too wide

Column = dict[str, object]  # cells by configuration
Table = dict[str, Column]  # columns by title


def make_section(task: str, sweep: str, records: Records, folder: pathlib.Path) -> str:
  """Returns a sweep's section of the results page; draws its picture in `folder`."""
  config = _first(records)["config"]
  if task == "music":
    describe = _describe_music
  elif task == "translation":
    is_of_lengths = config["evaluation.given_lengths"]
    describe = _describe_lengths if is_of_lengths else _describe_translation
  elif task == "graphs":
    is_of_chains = config["data.source"] == "clutrr"
    describe = _describe_chains if is_of_chains else _describe_folds
  elif task == "length_tasks":
    describe = _describe_task
  else:
    raise InputError(f"no table for runs of {task}: add one to {__name__}.make_section")
  return describe(sweep, records, folder)


# All tasks
# --------------------------------------------------------------------------------------


def _first(records: Records) -> Record:
  return next(iter(records.values()))[0]


def _join_parts(records: Records, parts: list[str], facts: Mapping[str, object]) -> str:
  """Joins a sweep's tables with a table of its configs, and facts about its runs."""
  facts = {**facts, **_collect_facts(records)}
  lines = [f"- {name}: {value}" for name, value in facts.items()]
  parts = [*parts, _tabulate_configs(records), "\n".join(lines)]
  return "\n\n".join(filter(None, parts))


def _collect_facts(records: Records) -> dict[str, str]:
  """Collects the budget, machine, code and versions of the runs."""
  runs = list(itertools.chain(*records.values()))
  minutes = statistics.median(run["budget"]["minutes"] for run in runs)
  values = defaultdict(set)
  for run in runs:
    budget, packages = run["budget"], run["packages"]
    averaged = len(run.get("checkpoints", ()))
    facts = {
      "updates": f"{budget['updates']:,}",
      "tokens or nodes per update, at most": f"{budget['tokens_per_update']:,}",
      "minutes per run (median)": f"{minutes:.1f}",
      "checkpoints averaged": averaged or run["config"]["decoding.average_checkpoints"],
      "hardware": run["hardware"],
      "date": run["date"][:10],
      "commit": short_commit(run["commit"]),
    }
    for name in ("python", "jax", "flax"):
      facts[name] = packages.get(name)
    for name, value in facts.items():
      values[name].add(str(value))
  return {name: ", ".join(sorted(texts)) for name, texts in values.items()}


def _tabulate_configs(records: Records) -> str:
  """Tabulates the config values that differ between configurations, except the seed."""
  table = {}
  for key in sorted(_first(records)["config"].keys() - {"seed"}):
    column = {}
    for configuration, runs in records.items():
      column[configuration] = _format_value(runs[0]["config"].get(key))
    if len({*column.values()}) > 1:
      table[key] = column
  return column_table("config", table) if table else ""


def _format_value(value: object) -> str:
  """Formats a value of a config; 0 and 0.0 look the same."""
  is_word = isinstance(value, str) and value
  return f"`{value if is_word else json.dumps(value).removesuffix('.0')}`"


def _average(
  records: Records, score: Callable[[Record], float], digits: int = 2
) -> Column:
  """Returns a column: each configuration's mean score over seeds, and its interval."""
  column = {}
  for configuration, runs in records.items():
    column[configuration] = mean_and_interval([*map(score, runs)], digits)
  return column


def _score(split: str, kind: str) -> Callable[[Record], float]:
  """Makes a function that returns the score `kind` of a run on a split."""
  return lambda run: run["scores"][split][kind]


def _list_seeds(records: Records) -> Column:
  column = {}
  for configuration, runs in records.items():
    column[configuration] = ", ".join(str(run["seed"]) for run in runs)
  return column


def _begin_table(records: Records) -> Table:
  """Returns the first columns of a sweep's table: seeds and last validation loss."""
  losses = _average(records, lambda run: run["curve"][-1][1], 3)
  return {"seeds": _list_seeds(records), "valid loss": losses}


def _choose_cells(cells: Mapping[str, object], records: Records) -> Column:
  """Returns a column of published results; configurations without one get a dash."""
  return {configuration: cells.get(configuration, "-") for configuration in records}


def _tabulate_differences(
  title: str,
  records: Records,
  score: Callable[[Record], float],
  digits: int = 2,
  is_paired: bool = False,
) -> str:
  """Tabulates the differences between configurations, if there are several.

  Runs that diverged are left out. If there are more than 8 configurations, each is
  compared only with the first one. If `is_paired`, a cell has the mean of the
  differences between runs with the same seed. Otherwise it has the difference of two
  means.
  """
  if len(records) < 2:
    return ""
  scores = defaultdict(dict)  # by seed
  for configuration, runs in records.items():
    for run in runs:
      value = score(run)
      if math.isfinite(value):
        scores[configuration][run["seed"]] = value
  others = [*records] if len(records) <= _MOST_PAIRED else [*records][:1]
  table = defaultdict(dict)
  for configuration, other in itertools.product(records, others):
    cell = "-"
    if configuration != other:
      cell = _compare(scores[configuration], scores[other], digits, is_paired)
    table[other][configuration] = cell
  return column_table(f"{title}, row - column", table)


def _compare(
  row: Mapping[int, float], column: Mapping[int, float], digits: int, is_paired: bool
) -> str:
  """Formats the difference between two configurations' scores, given by seed."""
  if not is_paired:
    return format_difference([*row.values()], [*column.values()], digits=digits)
  differences = [row[seed] - column[seed] for seed in sorted(row.keys() & column)]
  return format_difference(differences, digits=digits)


def _title_picture(records: Records) -> str:
  """Makes a picture's title: the data, the number of seeds, and what is drawn."""
  source = _first(records)["config"]["data.source"]
  counts = [len(runs) for runs in records.values()]
  fewest, most = min(counts), max(counts)
  if most == 1:
    return f"{source}, 1 seed"
  seeds = most if fewest == most else f"{fewest} to {most}"
  title = f"{source}, {seeds} seeds"
  return title if len(records) > MOST_SHADED else f"{title}: mean, lowest to highest"


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

  `measures` names the columns of the records' curves. Curves begin at the update
  `start`. With many configurations, only the last measure is drawn.
  """
  panels = []
  for column, measure in enumerate(measures, start=1):
    panels.append(_plot_learning("updates", measure, records, column, start))
  if len(records) > MOST_SHADED:
    panels = panels[-1:]
  picture = folder / f"{sweep}-learning.png"
  spread_curves(panels, picture, _title_picture(records))
  return _link(f"Learning curves: {sweep}", picture)


def _plot_learning(
  axis: str, measure: str, records: Records, column: int, start: float = 0
) -> SpreadPanel:
  """Returns a plot of a measure over updates, which is a column of the curves."""
  curves = {}
  for configuration, runs in records.items():
    curves[configuration] = _collect_values(runs, column, start)
  steps = sorted(set().union(*curves.values()))
  return SpreadPanel(axis, f"validation {measure}", curves, ticks=steps)


def _collect_values(
  runs: Sequence[Record], column: int, start: float
) -> dict[float, list[float]]:
  """Collects a column of the runs' curves; returns its values by step."""
  values = defaultdict(list)
  for line in itertools.chain(*(run["curve"] for run in runs)):
    step, value = line[0], line[column]
    if step >= start and value is not None:
      values[step].append(value)
  return dict(sorted(values.items()))


# Translation
# --------------------------------------------------------------------------------------


def _is_lower_case(config: Mapping[str, Any]) -> bool:
  """Checks whether the text is in lower case before the model reads it."""
  is_multi30k = config["data.source"] == "multi30k"
  is_prepared = is_multi30k and config["data.multi30k.prepared"]
  return config["data.lowercase"] or is_prepared


def _describe_translation(sweep: str, records: Records, folder: pathlib.Path) -> str:
  first = _first(records)
  config = first["config"]
  splits = sorted(first["scores"], key=lambda split: split != "test")  # test is first
  main_split = splits[0]
  runs = list(itertools.chain(*records.values()))
  table = _begin_table(records)
  for kind, title in translation.TITLES.items():
    for split in [main_split] if kind == "paper_bleu" else splits:
      # Old records lack some scores.
      if all(kind in run["scores"][split] for run in runs):
        name = title if split == main_split else f"{title}, {split}"
        table[name] = _average(records, _score(split, kind))
  for name, bleu in _PAPER.get(sweep.partition("-")[0], {}).items():
    table[name] = _choose_cells(bleu, records)
  facts = {"data": f"{config['data.source']} {config['data.languages']}"}
  if _is_lower_case(config):
    facts["text"] = "in lower case, references too, whatever the signatures say"
  for split, sentences in first["sentences"].items():
    facts[f"sentences of {split}"] = f"{len(sentences):,}"
  signatures = first["scores"][main_split]["signatures"]
  facts["sacreBLEU"] = signatures["sacrebleu"]
  facts["paper's BLEU"] = signatures["paper_bleu"]
  title, score = f"sacreBLEU of {main_split}", _score(main_split, "sacrebleu")
  differences = _tabulate_differences(title, records, score)
  curves = _draw_curves(sweep, records, ["loss (nats per token)", "BLEU"], folder)
  return _join_parts(records, [column_table(sweep, table), differences, curves], facts)


def _join_sentences(run: Record, splits: Sequence[str]) -> np.ndarray:
  return np.concatenate([run["sentences"][split] for split in splits])


# Schemes are compared when their exact matches on validation (%) first reach this
# level, by source of the data: at equal quality on short sequences, longer ones tell
# them apart.
_LEVELS, _OTHER_LEVEL = {"scan": 90}, 50
_ONLY = " only"  # ends the names of configurations with positions in one stack


def _describe_lengths(sweep: str, records: Records, folder: pathlib.Path) -> str:
  """Makes a section with three tables of exact matches, and a picture.

  The first table is for the step at which validation first reaches a level. The other
  tables are for the end of training, by length: one for translations that are free to
  end, and one for translations with the lengths of their references; it is one table if
  these are equal. The picture shows the matches over length.
  """
  first = _first(records)
  source = first["config"]["data.source"]
  splits = {"EOS free": [], "length given": []}
  facts = {}
  for split in first["scores"]:
    if split.endswith(translation.GIVEN):
      splits["length given"].append(split)
    else:
      splits["EOS free"].append(split)
      facts[f"sentences of {split}"] = f"{len(first['sentences'][split]):,}"
  facts["data"] = source
  parts = [_compare_at_level(sweep, records, _LEVELS.get(source, _OTHER_LEVEL))]
  free, given = [_tabulate_lengths(records, names) for names in splits.values()]
  if free == given:
    parts.append(column_table(f"{sweep}: EOS free, or length given", free))
  else:
    parts.append(column_table(f"{sweep}: EOS free", free))
    parts.append(column_table(f"{sweep}: length given", given))
  parts.append(_draw_exact(records, splits, folder / f"{sweep}.png"))
  return _join_parts(records, parts, facts)


def _compare_at_level(sweep: str, records: Records, level: float) -> str:
  """Tabulates exact matches at the step where validation first reaches a level.

  `level` is a percentage: the exact matches on the validation split. The column
  "reached" counts the runs that reach it. Steps and scores are means over these runs.
  """
  table = defaultdict(dict, seeds=_list_seeds(records))
  for configuration, runs in records.items():
    values = defaultdict(list)
    for run in runs:
      for name, value in _find_level(run, level).items():
        values[name].append(value)
    table["reached"][configuration] = f"{len(values['updates'])} of {len(runs)}"
    for name, reached in values.items():
      digits = 0 if name == "updates" else 1
      table[name][configuration] = mean_and_interval(reached, digits)
  return column_table(f"{sweep}: valid first at {level}%", table)


def _find_level(run: Record, level: float) -> dict[str, float]:
  """Finds the first step with at least `level` percent of exact matches on validation.

  Returns the number of updates, and the exact matches of each split at that step.
  Returns an empty dictionary if the run never reaches the level.
  """
  for step, valid in run["exact"]["valid"]:
    if valid >= level:
      exact = {split: dict(curve)[step] for split, curve in run["exact"].items()}
      return {"updates": float(step), **exact}
  return {}


def _tabulate_lengths(records: Records, splits: Sequence[str]) -> dict[str, dict]:
  """Returns columns of exact matches (%) after training, by length in tokens."""
  table = {"valid": _average(records, lambda run: run["exact"]["valid"][-1][1], 1)}
  lengths = _list_lengths(records, splits)
  is_longer = _exceeds_training(records, lengths)
  masks = _bin_lengths(lengths, is_longer, num_trained=1, num_longer=4)
  if is_longer.any():
    masks.append(is_longer)
  for mask in masks:
    binned = lengths[mask]
    name = f"{binned.min()} to {binned.max()} ({len(binned):,})"
    table[name] = _average(records, _accuracy(splits, mask), 1)
  return table


def _list_lengths(records: Records, splits: Sequence[str]) -> np.ndarray:
  """Returns the length of each example of the splits, the same in all runs."""
  return _join_sentences(_first(records), splits)[:, 0]


def _bin_lengths(
  lengths: np.ndarray, is_longer: np.ndarray, num_trained: int, num_longer: int
) -> list[np.ndarray]:
  """Divides examples into bins by length; returns a mask for each bin.

  The first bins, at most `num_trained`, hold the lengths that occur in training. The
  others, at most `num_longer`, hold those of `is_longer`. Bins of each kind have about
  the same number of examples. A kind without examples has no bins.
  """
  masks = []
  for side, num_bins in ((~is_longer, num_trained), (is_longer, num_longer)):
    if not side.any():
      continue
    shares = np.arange(1, num_bins + 1) / num_bins
    ends = np.unique(np.quantile(lengths[side], shares, method="lower"))
    bin_index = np.searchsorted(ends, lengths)
    masks += [side & (bin_index == number) for number in range(len(ends))]
  return masks


def _exceeds_training(records: Records, lengths: np.ndarray) -> np.ndarray:
  """Returns whether each length, not counting EOS, is longer than in training."""
  return lengths >= _first(records)["config"]["batches.max_length"]


def _accuracy(splits: Sequence[str], mask: Any = ...) -> Callable[[Record], float]:
  """Makes a function that returns the percentage of right answers of a run.

  A translation is right if it equals its reference, and a graph if its class is
  predicted. In length tasks, each example is a batch with its share of right answers.
  The examples are those of `splits`; `mask` selects some of them, by default all.
  """
  return lambda run: 100 * _join_sentences(run, splits)[mask, -1].mean()


def _make_curves(
  records: Records, scores: Mapping[float, Callable[[Record], float]]
) -> dict[str, dict[float, list[float]]]:
  """Returns, for each configuration and each length, the scores of all seeds."""
  curves = {}
  for configuration, runs in records.items():
    curve = curves[configuration] = {}
    for length, score in scores.items():
      curve[length] = [*map(score, runs)]
  return curves


def _plot_by_length(
  axis: str,
  measure: str,
  records: Records,
  splits: Sequence[str],
  longest: int,
  num_trained: int,
  num_longer: int,
) -> SpreadPanel:
  """Plots the accuracy by length; training has lengths up to `longest`."""
  lengths = _list_lengths(records, splits)
  masks = _bin_lengths(lengths, lengths > longest, num_trained, num_longer)
  scores = {lengths[mask].mean(): _accuracy(splits, mask) for mask in masks}
  mark = longest + 0.5, "longest in training"
  return SpreadPanel(axis, measure, _make_curves(records, scores), mark)


def _draw_exact(
  records: Records, splits: Mapping[str, Sequence[str]], picture: pathlib.Path
) -> str:
  """Draws exact matches over length; returns a line of Markdown with the picture.

  Configurations with positions in one stack only are left out.
  """
  records = {name: runs for name, runs in records.items() if not name.endswith(_ONLY)}
  longest = _first(records)["config"]["batches.max_length"] - 1  # without EOS
  panels = []
  for end, end_splits in splits.items():
    axis = f"length in tokens, {end}"
    panel = _plot_by_length(axis, "exact (%)", records, end_splits, longest, 4, 8)
    panels.append(panel)
  spread_curves(panels, picture, _title_picture(records))
  return _link(f"Exact matches over length: {picture.stem}", picture)


# Music
# --------------------------------------------------------------------------------------


def _describe_music(sweep: str, records: Records, folder: pathlib.Path) -> str:
  first = _first(records)
  config = first["config"]
  main_split = next(iter(first["scores"]))
  facts = {}
  for split, rows in first["sentences"].items():
    facts[f"pieces of {split}"] = len(rows)
  for name in ("num_layers", "width", "num_heads"):
    facts[name] = config[f"model.{name}"]
  table = _begin_table(records)
  for split in first["scores"]:
    table[f"{split}, a token"] = _average(records, _score(split, "nll"), 3)
  # In sweeps of position schemes, the name `relative` means another scheme.
  if config["data.source"] == "chorales" and not sweep.startswith("positions"):
    name = "published (second hand), valid, a token"
    table[name] = _choose_cells(music.PUBLISHED, records)
  # The loss falls so far in the first tenth of the updates that it would hide the rest.
  start = first["budget"]["updates"] / 10
  title, score = f"{main_split}, a token", _score(main_split, "nll")
  differences = _tabulate_differences(title, records, score, 3)
  curves = _draw_curves(sweep, records, ["loss (nats per token)"], folder, start)
  return _join_parts(records, [column_table(sweep, table), differences, curves], facts)


# Graphs
# --------------------------------------------------------------------------------------


def _average_accuracy(records: Records, *splits: str) -> Column:
  """Returns a column: the accuracy of each configuration, and of a guess.

  The guess is always the class that is most frequent in training.
  """
  runs = next(iter(records.values()))
  if runs[0]["config"]["data.source"] != "tu":
    runs = runs[:1]  # seeds of `tu` are folds: only these differ in the majority class
  guesses = []
  for run in runs:
    shares, sizes = [], []
    for split in splits:
      shares.append(run["scores"][split]["majority"])
      sizes.append(len(run["sentences"][split]))
    guesses.append(np.average(shares, weights=sizes))
  column = _average(records, _accuracy(splits), 1)
  return {**column, _GUESS: mean_and_interval(guesses, 1)}


def _describe_chains(sweep: str, records: Records, folder: pathlib.Path) -> str:
  sentences = _first(records)["sentences"]
  longest = graphs.LONGEST_TRAINED
  is_longest = np.array(sentences["valid"])[:, 0] == longest
  longest_accuracy = _accuracy(["valid"], is_longest)
  longer_tests = [f"test_{k}" for k in graphs.CTP if k > longest]
  table = _begin_table(records)
  table["valid"] = _average_accuracy(records, "valid")
  table[f"valid, {longest}"] = _average(records, longest_accuracy, 1)
  table[f"test, {longest}"] = _average_accuracy(records, f"test_{longest}")
  table[f"test, {longest + 1} to {max(graphs.CTP)}"] = _average_accuracy(
    records, *longer_tests
  )
  by_length, scores = {}, {}
  for k, published in graphs.CTP.items():
    test = f"test_{k}"
    rows = {**dict.fromkeys(records), graphs.NAME: published}
    name = f"{k} ({len(sentences[test])}; {_DISTINCT[k]})"
    by_length[name] = rows | _average_accuracy(records, test)
    scores[k] = _accuracy([test])
  picture = folder / f"{sweep}-lengths.png"
  curves = _make_curves(records, scores)
  graphs.draw_lengths(curves, picture, _title_picture(records))
  differences = _tabulate_differences(
    f"valid, {longest}", records, longest_accuracy, is_paired=True
  )
  parts = [
    column_table(sweep, table),
    differences,
    column_table("test, relations (graphs)", by_length),
    _link("Accuracy over length", picture),
  ]
  return _join_parts(records, parts, {})


def _describe_folds(sweep: str, records: Records, _: pathlib.Path) -> str:
  config = _first(records)["config"]
  table = {"seeds": _list_seeds(records)}
  for split in ("valid", "test"):
    table[split] = _average_accuracy(records, split)
  title = f"{sweep}: {config['data.tu.name']}, {config['data.tu.num_folds']} folds"
  differences = _tabulate_differences(
    "test", records, _accuracy(["test"]), is_paired=True
  )
  return _join_parts(records, [column_table(title, table), differences], {})


# Length tasks
# --------------------------------------------------------------------------------------

_RANDOM = ", random"  # ends the names of configurations with random positions
_STARTS = (101, 201)  # lengths at which columns begin, after the first longer ones
_LONGER = "longer"  # the split of all tests


def compare_tasks(sweeps: Iterable[Records]) -> str:
  """Tabulates the accuracy on longer inputs, by configuration and task."""
  table = {}
  for records in sweeps:
    task = _first(records)["config"]["data.source"]
    table[task] = _average(records, _score(_LONGER, "accuracy"), 1)
  return column_table("accuracy (%), longer than in training", table)


def _describe_task(sweep: str, records: Records, folder: pathlib.Path) -> str:
  """Tabulates accuracy by length, and the effect of random positions.

  The pictures show accuracy over length, and learning curves.
  """
  config = _first(records)["config"]
  longest_trained, longest = config["batches.max_length"], config["evaluation.longest"]
  table = _begin_table(records)
  table[f"1 to {longest_trained}"] = _average(records, _score("within", "accuracy"), 1)
  lengths = _list_lengths(records, [_LONGER])
  starts = [start for start in _STARTS if longest_trained + 1 < start <= longest]
  bounds = [longest_trained + 1, *starts, longest + 1]
  for first, end in itertools.pairwise(bounds):
    is_between = (first <= lengths) & (lengths < end)
    if is_between.any():
      column = _average(records, _accuracy([_LONGER], is_between), 1)
      table[f"{first} to {end - 1}"] = column
  longer = _average(records, _score(_LONGER, "accuracy"), 1)
  table[f"{longest_trained + 1} to {longest}"] = longer
  table["random - plain"] = _compare_random(records)
  parts = [column_table(f"{sweep}: accuracy (%)", table)]
  parts.append(_draw_task_lengths(records, folder / f"{sweep}.png"))
  parts.append(_draw_task_learning(records, folder / f"{sweep}-learning.png"))
  facts = {
    "task": config["data.source"],
    "inputs per update": config["batches.tokens"] // longest_trained,
  }
  return _join_parts(records, parts, facts)


def _compare_random(records: Records) -> Column:
  """Returns what random positions add to the accuracy of each scheme."""
  score = _score(_LONGER, "accuracy")
  column = {}
  for configuration, runs in records.items():
    plain = records.get(configuration.removesuffix(_RANDOM))
    if configuration.endswith(_RANDOM) and plain:
      samples = [*map(score, runs)], [*map(score, plain)]
      column[configuration] = format_difference(*samples, digits=1)
  return column


def _split_by_positions(records: Records) -> dict[str, Records]:
  """Divides configurations into those with plain and with random positions."""
  split = {"plain": {}, "random": {}}
  for configuration, runs in records.items():
    kind = "random" if configuration.endswith(_RANDOM) else "plain"
    split[kind][configuration.removesuffix(_RANDOM)] = runs
  return {kind: shown for kind, shown in split.items() if shown}


def _draw_task_lengths(records: Records, picture: pathlib.Path) -> str:
  """Draws accuracy over length, with plain and with random positions."""
  longest = _first(records)["config"]["batches.max_length"]
  splits = "within", _LONGER
  panels = []
  for kind, shown in _split_by_positions(records).items():
    axis = f"length of the input, {kind} positions"
    # Each bin has about five lengths.
    panel = _plot_by_length(axis, "accuracy (%)", shown, splits, longest, 8, 10)
    panels.append(panel)
  spread_curves(panels, picture, _title_picture(records))
  return _link(f"Accuracy over length: {picture.stem}", picture)


def _draw_task_learning(records: Records, picture: pathlib.Path) -> str:
  """Draws validation accuracy over updates, with plain and with random positions."""
  panels = []
  for kind, shown in _split_by_positions(records).items():
    axis = f"updates, {kind} positions"
    panels.append(_plot_learning(axis, "accuracy (%)", shown, column=2))
  spread_curves(panels, picture, _title_picture(records))
  return _link(f"Learning curves: {picture.stem.removesuffix('-learning')}", picture)
