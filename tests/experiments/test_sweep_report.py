"""The report: every number is that of the raw records, and what may not be compared is not."""

import copy
import json
import pathlib
import re
import shutil

import numpy as np
import pytest
import sacrebleu

from experiments import report
from experiments.reports import captions, lengths, paper
from experiments.reports import tables as table_sections
from experiments.reports.results import Table, read_tables
from relpos_jax.evaluation.record import digest

RESULTS = pathlib.Path(__file__).parents[2] / "results"
ROWS = dict(relative=0.8, sinusoidal=0.7, both=0.8, none=0.55)


def invent(sweep: str, row: str, seed: int, quality: float, num_sentences: int = 300):
  """The record of a run that never was; in long sentences fewer words are right."""
  rng = np.random.default_rng(0)
  lengths = rng.integers(4, 28, num_sentences)
  ref_lens = lengths - rng.integers(0, 3, num_sentences)
  rng = np.random.default_rng([seed, *map(ord, sweep + row)])
  hyp_lens = ref_lens + rng.integers(0, 2, num_sentences)
  matches = [rng.binomial(ref_lens, quality * (1 - lengths / 200))]
  for _ in range(3):
    matches.append(rng.binomial(np.maximum(matches[-1] - 1, 0), quality))
  sentences = np.stack([lengths, hyp_lens, ref_lens, *matches], axis=1)
  score = bleu(sentences)
  signatures = dict(sacrebleu="tok:none|smooth:exp", paper_bleu="tok:moses-de+hyphens")
  config = {"data.source": "multi30k", "model.width": 128, "seed": seed}
  config |= {"batches.max_length": 16} if sweep == "lengths" else {}
  return dict(
    **dict(sweep=sweep, row=row, seed=seed, digest=digest(config), config=config),
    **dict(commit="0123456789abcdef" + 24 * "0", date=f"2026-11-2{seed}T10:00:00+00:00"),
    **dict(hardware="1 x cpu, 4 cores of AMD EPYC", packages=dict(python="3.11.7", jax="0.10.2")),
    budget=dict(updates=1500, tokens_per_update=1024, minutes=5.5, tokens_per_second=None),
    scores=dict(test=dict(sacrebleu=score, paper_bleu=score + 0.1, signatures=signatures)),
    sentences=dict(test=sentences.tolist()),
    curve=[[step, 4 - quality - step / 1000, score * step / 1500] for step in (500, 1000, 1500)],
  )


def bleu(sentences) -> float:
  """As sacreBLEU has it, of rows of sentences."""
  _, hyp_len, ref_len, *correct = np.sum(sentences, axis=0).tolist()
  total = [sum(max(0, row[1] - n) for row in np.asarray(sentences).tolist()) for n in range(4)]
  return sacrebleu.BLEU.compute_bleu(correct, total, hyp_len, ref_len, "exp").score


def invent_sweep(sweep: str, rows: dict[str, float], num_seeds: int = 3):
  return [invent(sweep, row, seed, rows[row]) for seed in range(num_seeds) for row in rows]


def of_config(record, **values):
  """A copy whose config has other values, as if it had been run so."""
  config = record["config"] | values
  return record | dict(config=config, digest=digest(config))


def write_runs(folder: pathlib.Path, *sweeps) -> pathlib.Path:
  """A results folder with a file for each list of records."""
  (folder / "runs").mkdir(parents=True, exist_ok=True)
  for records in sweeps:
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "runs" / f"{records[0]['sweep']}.jsonl").write_text(text, encoding="utf-8")
  return folder


def text_of(folder: pathlib.Path, *sweeps) -> str:
  """The report of these records."""
  return report.write(write_runs(folder, *sweeps)).read_text(encoding="utf-8")


def tables_in(text: str) -> list[list[dict[str, str]]]:
  """Each Markdown table: its rows, by the names of their columns."""
  tables, lines = [], []
  for line in [*text.splitlines(), ""]:
    if line.startswith("|"):
      lines.append([cell.strip() for cell in line[1:-1].split("|")])
    elif lines:
      tables.append([dict(zip(lines[0], line, strict=True)) for line in lines[2:]])
      lines = []
  return tables


def pictures_in(text: str) -> list[str]:
  """The files that it shows."""
  return [part.split(")")[0] for part in text.split("](")[1:]]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
  """They cost most of the time; `whole` has drawn them."""
  for module in (table_sections, lengths):
    monkeypatch.setattr(module, "spread_curves", lambda panels, path: path)


@pytest.fixture(scope="module")
def records():
  return invent_sweep("table1", ROWS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, records):
  """The report of one table."""
  return text_of(tmp_path_factory.mktemp("alone"), records)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, records):
  """The report of some tables, and its folder."""
  folder = tmp_path_factory.mktemp("results")
  table2 = invent_sweep("table2", {"k=0": 0.55, "k=1": 0.75, "k=2": 0.8, "k=64": 0.8})
  table3 = invent_sweep("table3", dict(keys=0.8, values=0.7, neither=0.55))
  for row in range(len(table3)):
    if table3[row]["row"] == "neither":
      table3[row] = of_config(table3[row], **{"model.positions": "none"})
  lengths = invent_sweep("lengths", {"relative, k=4": 0.8, "sinusoidal": 0.6, "none": 0.6})
  mine = invent_sweep("mine", dict(a=0.7, b=0.7), num_seeds=1)
  return text_of(folder, records, table2, table3, lengths, mine), folder


class TestNumbers:
  def test_means_and_intervals_are_those_of_the_seeds(self, whole, records):
    rows = {row[""]: row for row in tables_in(whole[0])[0]}
    assert list(rows) == list(ROWS)
    for name, row in rows.items():
      scores = [r["scores"]["test"]["sacrebleu"] for r in records if r["row"] == name]
      half_width = 4.30265 * np.std(scores, ddof=1) / np.sqrt(3)
      assert row["sacreBLEU"] == f"{np.mean(scores):.2f} ± {half_width:.2f}"
      assert row["paper's BLEU"] == f"{np.mean(scores) + 0.1:.2f} ± {half_width:.2f}"
      losses = [r["curve"][-1][1] for r in records if r["row"] == name]
      assert row["valid loss"] == f"{np.mean(losses):.3f} ± 0.000"
      assert row["seeds"] == "0, 1, 2"

  def test_differences_are_from_the_row_to_compare_with(self, whole, records):
    rows = {row[""]: row for row in tables_in(whole[0])[0]}
    mean = lambda name: np.mean(
      [r["scores"]["test"]["sacrebleu"] for r in records if r["row"] == name]
    )
    told = rows["relative"]["difference"]
    assert told.startswith(f"{mean('relative') - mean('sinusoidal'):+.2f} ± ")
    assert told.endswith(" from sinusoidal") and float(rows["relative"]["p"]) == 0.001
    assert rows["sinusoidal"]["difference"] == rows["sinusoidal"]["p"] == ""

  def test_the_papers_columns_stand_beside(self, whole):
    tables = tables_in(whole[0])
    of = {row[""]: row["paper, EN-DE base"] for row in tables[0]}
    assert of == dict(relative="26.8", sinusoidal="26.5", both="-", none="-")
    of = {
      row[""]: row["paper, EN-DE base"] for row in tables_in(whole[0].split("## Table 2")[1])[0]
    }
    assert of == {"k=0": "12.5", "k=1": "25.5", "k=2": "25.8", "k=64": "25.9"}

  def test_one_seed_has_no_interval_and_is_no_claim(self, tmp_path):
    text = text_of(tmp_path, invent_sweep("table1", ROWS, num_seeds=1))
    (main,) = [table for table in tables_in(text) if "seeds" in table[0]]
    assert not any("±" in cell for row in main for cell in row.values())
    section = text[text.index("## Table 1") :]
    assert "One seed of all rows: no interval" in section
    assert "Whether the paper's ordering holds is not to be seen" in section
    assert "both may or may not be above it" in section
    assert "beyond the spread (" not in section and "as in the paper" not in section

  def test_another_split_has_a_column_of_its_own(self, tmp_path, records):
    records = copy.deepcopy(records)
    for record in records:
      for part in ("scores", "sentences"):
        record[part]["long"] = record[part]["test"]
    (main, *_) = tables_in(text_of(tmp_path, records))
    assert all(row["sacreBLEU, long"] == row["sacreBLEU"] for row in main)

  def test_captions_say_budget_hardware_and_date(self, whole):
    caption = whole[0].split("## Table 1")[1].split("\n|")[0]
    for words in (
      *("multi30k en-de", "1,500 updates of 1,024 tokens", "5.5 minutes"),
      *("1 x cpu, 4 cores of AMD EPYC", "2026-11-20, 2026-11-21, 2026-11-22"),
      *("commit 0123456789ab;", "jax 0.10.2", "300 sentences of test", "tok:none|smooth:exp"),
    ):
      assert words in caption

  @pytest.mark.parametrize(
    "lost, told", [((0, 2), "not finite"), ((0,), "{mean} (1 not finite)"), ((), "{mean}")]
  )
  def test_a_loss_that_is_not_finite_is_in_no_mean_and_told(self, tmp_path, lost, told):
    records = invent_sweep("table1", dict(none=0.55, relative=0.8), num_seeds=3)
    del records[2:4]  # seed 1
    for record in records:
      if record["row"] == "relative" and record["seed"] in lost:
        record["curve"] = [[step, None, None] for step, *_ in record["curve"]]
    text = text_of(tmp_path, records)
    (row,) = [row for row in tables_in(text)[0] if row[""] == "relative"]
    mean = f"{4 - 0.8 - 1.5:.3f}" + ("" if lost else " ± 0.000")
    assert row["valid loss"] == told.format(mean=mean) and row["seeds"] == "0, 2"
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    assert lines == [f"- relative, seed {seed}: 3 of 3 evaluations" for seed in lost]
    assert ("in no mean and no picture" in text) == bool(lost)

  def test_changed_files_are_told(self, tmp_path, records):
    records = [record | dict(commit=record["commit"] + "-dirty") for record in records]
    assert "commit 0123456789ab with changes;" in text_of(tmp_path, records)

  def test_the_same_records_give_the_same_report(self, whole, tmp_path):
    text, folder = whole
    shutil.copytree(folder / "runs", tmp_path / "runs")
    assert report.write(tmp_path).read_text(encoding="utf-8") == text

  def test_every_picture_is_there(self, whole):
    text, folder = whole
    names = pictures_in(text)
    assert {f"report/{name}-learning.png" for name in ("table1", "table2", "mine")} <= {*names}
    assert all((folder / name).stat().st_size > 10_000 for name in names)

  def test_tables_stand_in_the_papers_order_and_unknown_ones_last(self, whole):
    titles = [line[3:] for line in whole[0].splitlines() if line.startswith("## ")]
    starts = ["Table 1", "Table 2", "Table 3", "Lengths unseen", "mine", "A check"]
    assert [title.startswith(start) for title, start in zip(titles, starts, strict=True)] == [
      True
    ] * 6


class TestSentences:
  def sentence(self, folder, rows, sweep="table3"):
    text = text_of(folder, invent_sweep(sweep, rows))
    return text.split("|\n\n")[1].split("\n\n")[1]

  def test_the_papers_ordering_holds(self, tmp_path):
    rows = {"keys and values": 0.8, "keys": 0.8, "values": 0.7, "neither": 0.5}
    told = self.sentence(tmp_path, rows)
    assert told.startswith(
      "The paper's ordering holds. Of its 5 differences, 5 are beyond the spread ("
    )
    assert (
      "keys and values over values: +" in told
      and "Of its 1 equality, none is broken beyond the spread." in told
    )

  def test_the_papers_ordering_does_not_hold(self, tmp_path):
    told = self.sentence(tmp_path, dict(keys=0.6, values=0.8, neither=0.5))
    assert told.startswith(
      "The paper's ordering does not hold here. Of its 3 differences, 2 are beyond"
    )
    assert "1 is the other way round (keys over values: -" in told

  def test_nothing_is_claimed_inside_the_spread(self, tmp_path):
    told = self.sentence(tmp_path, dict(keys=0.7, values=0.7, neither=0.7))
    assert told.startswith("Whether the paper's ordering holds is not to be seen in these runs.")
    assert "beyond" not in told and "3 are inside the spread (" in told

  def test_equals_of_the_paper_that_are_apart(self, tmp_path):
    told = self.sentence(tmp_path, {"keys and values": 0.6, "keys": 0.8})
    assert told.startswith(
      "No two of these rows are apart in the paper. Of its 1 equality, 1 is broken beyond"
    )
    assert "(keys over keys and values: +" in told

  @pytest.mark.parametrize(
    "rows, verdict",
    [
      ({"keys and values": 0.8, "keys": 0.7, "values": 0.6}, "The paper's ordering holds"),
      (
        {"keys and values": 0.7, "keys": 0.6, "values": 0.8},
        "The paper's ordering does not hold here",
      ),
    ],
  )
  def test_a_broken_equality_is_in_the_verdict(self, tmp_path, rows, verdict):
    told = self.sentence(tmp_path, rows)
    assert told.startswith(f"{verdict}; its equality does not hold. Of its 2 differences, ")

  def test_of_some_equalities_those_that_are_broken_are_counted_in_the_verdict(self, tmp_path):
    told = self.sentence(tmp_path, {"k=2": 0.8, "k=16": 0.8, "k=256": 0.6, "k=0": 0.5}, "table2")
    assert told.startswith(
      "The paper's ordering holds; 2 of its 3 equalities do not hold. Of its 3 "
    )

  def test_a_table_that_the_paper_has_not(self, tmp_path):
    told = self.sentence(tmp_path, {"clip, k=4": 0.8, "zero, k=4": 0.6}, "beyond")
    assert told.startswith(
      "The paper has no such table. Here, beyond the spread: clip, k=4 over zero, k=4: +"
    )

  def test_a_row_is_compared_with_its_own_counterpart(self, tmp_path):
    rows = {"clip, k=4": 0.8, "zero, k=4": 0.6, "clip, k=16": 0.8, "zero, k=16": 0.8}
    (main,) = tables_in(text_of(tmp_path, invent_sweep("beyond", rows)))
    others = {row[""]: row["difference"].partition(" from ")[2] for row in main}
    assert others["zero, k=4"] == "clip, k=4" and others["zero, k=16"] == "clip, k=16"

  def test_sinusoids_beside_relative_positions(self, tmp_path, whole):
    assert "Against relative, both is not above it beyond the spread, as in the paper (" in whole[0]
    told = self.sentence(tmp_path, ROWS | dict(both=0.9), "table1")
    assert "Against relative, both is above it beyond the spread, unlike in the paper (+" in told

  def test_k_0_is_held_against_no_positions(self, tmp_path, whole):
    check = whole[0].split("## A check")[1]
    assert "k=0 of table2 over neither of table3: " in check and "inside the spread" in check
    none = invent_sweep("table1", dict(none=0.5))
    text = text_of(tmp_path, none, invent_sweep("table2", {"k=0": 0.7}))
    assert "k=0 of table2 over none of table1: +" in text and "or a mistake." in text
    lone = invent_sweep("table2", {"k=0": 0.7}, num_seeds=1)
    assert "of a single seed, so nothing is said." in text_of(tmp_path, none, lone)

  def test_k_0_is_not_held_against_runs_of_another_setting(self, tmp_path):
    none = invent_sweep("table1", dict(none=0.5))
    none = [of_config(record, **{"model.width": 64}) for record in none]
    text = text_of(tmp_path, none, invent_sweep("table2", {"k=0": 0.7}))
    assert "no run without positions in the same setting" in text


class TestHowRowsDiffer:
  """Under each table, from the configs: `KEY=VALUE` of what is not the same in all rows."""

  def table(self, **configs) -> Table:
    rows = {
      row: [of_config(invent("table1", row, seed, 0.8), **config) for seed in (0, 1)]
      for row, config in configs.items()
    }
    return Table("table1", rows, [])

  def test_every_row_has_every_value_that_differs_be_it_the_default(self):
    (line, _) = captions.how_rows_differ(
      self.table(
        relative={"model.positions": "both", "model.relative_values": False},
        clipped={"model.max_distance": 4, "model.dropout_rate": 0, "seed": 1},
        none={"model.positions": "none", "model.dropout_rate": 0.0},
      )
    )
    keys = ("model.dropout_rate", "model.max_distance", "model.positions", "model.relative_values")
    values = dict(
      relative=(0.1, 16, "both", "false"),
      clipped=(0, 4, "relative", "true"),
      none=(0, 16, "none", "true"),
    )
    told = [
      f"{row}: {', '.join(f'`{key}={x}`' for key, x in zip(keys, of, strict=True))}"
      for row, of in values.items()
    ]
    assert line == f"The rows' configs differ: {'; '.join(told)}."

  def test_a_single_key_is_named_once(self):
    (line, _) = captions.how_rows_differ(
      self.table(**{"k=4": {"model.max_distance": 4}, "k=16": {}})
    )
    assert line == "The rows' configs differ in `model.max_distance` alone: k=4: `4`; k=16: `16`."

  def test_rows_of_one_config_are_told_and_one_row_is_not(self):
    (line, _) = captions.how_rows_differ(self.table(a={}, b=dict(seed=3)))
    assert line == "The rows' configs do not differ."
    assert captions.how_rows_differ(self.table(a={})) == []

  def test_a_key_that_is_known_no_more_is_unset_in_other_rows(self):
    (line, _) = captions.how_rows_differ(self.table(a={"model.gone": ""}, b={}))
    assert line.endswith('in `model.gone` alone: a: `""`; b: `unset`.')

  def test_records_with_a_key_that_is_known_no_more_are_read(self, tmp_path, records, alone):
    older = [of_config(record, **{"data.embedded.seed": 3}) for record in records]
    assert text_of(tmp_path, older) == alone

  @pytest.mark.parametrize("name", ["report", "music", "graphs"])
  def test_every_section_of_the_committed_reports_tells_it(self, name):
    text = (RESULTS / f"{name}.md").read_text("utf-8")
    sections = re.split("\n##+ ", text)
    told = [s for s in sections if re.search(r"\|\n\nThe rows' configs differ.*: .*`", s)]
    assert len(told) == len([s for s in sections if re.search(r"\| (seeds|folds) \|", s)]) > 0


class TestLengths:
  def test_bands_hold_the_bleu_of_their_sentences(self, tmp_path):
    records = invent_sweep("lengths", {"relative, k=4": 0.8, "sinusoidal": 0.6})
    _, sides, bands = tables_in(text_of(tmp_path, records))

    def cell(row, first, last, digits):
      of_row = [np.array(r["sentences"]["test"]) for r in records if r["row"] == row]
      scores = [bleu(s[(first <= s[:, 0]) & (s[:, 0] <= last)]) for s in of_row]
      half_width = 4.30265 * np.std(scores, ddof=1) / np.sqrt(3)
      return f"{np.mean(scores):.{digits}f} ± {half_width:.{digits}f}"

    for side in sides:
      assert side["up to 15"] == cell(side[""], 0, 15, 2)
      assert side["above 15"] == cell(side[""], 16, 99, 2)
    assert len(bands) > 8
    for band in bands:
      first, _, last = band["tokens"].partition(" to ")
      for row in ("relative, k=4", "sinusoidal"):
        assert band[row] == cell(row, int(first), int(last or first), 1)
    assert sum(int(band["sentences"]) for band in bands) == 300

  def test_sentences_about_unseen_lengths(self, whole):
    told = whole[0].split("### By length: Lengths unseen")[1]
    assert "Above 15 tokens, beyond the spread: relative, k=4 over sinusoidal: +" in told
    assert (whole[1] / "report" / "lengths-length.png").exists()

  def test_lengths_that_were_all_trained_on_are_no_section(self, whole):
    assert whole[0].count("### By length") == 1

  def test_longer_than_the_test_split_is_not_longer_than_training(self, tmp_path, records):
    """Pairs as long as the batches let in train (`test_configs`); test need not have such."""
    records = [of_config(copy.deepcopy(r), **{"batches.max_length": 51}) for r in records]
    for record in records:
      record["scores"]["long"] = record["scores"]["test"]
      record["sentences"]["long"] = [[x + 40, *rest] for x, *rest in record["sentences"]["test"]]
    lengths = [row[0] for part in records[0]["sentences"].values() for row in part]
    longer = sum(length > 50 for length in lengths)
    assert max(row[0] for row in records[0]["sentences"]["test"]) < 50 and 0 < longer < 300
    told = f"Training lets in up to 50: so long are {600 - longer} sentences, longer {longer}. "
    assert told in text_of(tmp_path, records)


def change(record, path: str, value):
  """A copy with another value at "a.b"."""
  record = copy.deepcopy(record)
  *groups, name = path.split("/")
  group = record
  for part in groups:
    group = group[part]
  group[name] = value
  return record


class TestBadInput:
  def refused(self, call, folder, *words):
    answer = call("report", f"--results={folder}")
    assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1), answer.err
    assert all(word in answer.err for word in words), answer.err
    assert not (folder / "report.md").exists()

  def test_no_records(self, call, tmp_path):
    self.refused(call, tmp_path, f"no records in {tmp_path}", "experiments.sweep")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "table1.jsonl").write_text("")
    self.refused(call, tmp_path, f"no records in {tmp_path}")

  @pytest.mark.parametrize("keep", [1, 1000, -2])
  def test_a_half_written_line(self, call, tmp_path, records, keep):
    file = write_runs(tmp_path, records) / "runs" / "table1.jsonl"
    file.write_text(file.read_text() + json.dumps(invent("table1", "none", 7, 0.5))[:keep])
    self.refused(call, tmp_path, f"{file}, line 13", "half-written")

  def test_two_records_of_one_cell(self, call, tmp_path, records):
    write_runs(tmp_path, [*records, change(records[5], "commit", "f" * 40)])
    self.refused(call, tmp_path, "lines 6 and 13", "sinusoidal, seed 1", "delete one")

  @pytest.mark.parametrize(
    "path, value, words",
    [
      ("seed", "0", "'seed' is no int"),
      ("sweep", "table2", "its sweep is 'table2'"),
      ("budget/updates", None, "no number 'updates'"),
      ("curve", [[1, 2]], "its curve"),
      ("curve", [1, 2.5, 3.5], "its curve"),
      ("curve", [], "its curve"),
      ("curve", [[None, 2.5, 3.5]], "its curve"),
      ("curve", [[1, float("nan"), None]], "its curve"),
      ("curve", "none", "'curve' is no list"),
      ("commit", 7, "'commit' is no str"),
      ("config", [], "'config' is no dict"),
      (
        "config/task",
        "speech",
        "config.task is 'speech': choose one of translation, music, graphs",
      ),
      ("scores/test/sacrebleu", 12.25, "not 12.25"),
      ("scores/test/sacrebleu", float("nan"), "not nan"),
      ("scores/test/sacrebleu", None, "no number 'sacrebleu'"),
      ("scores/test/signatures", {}, "with its signature"),
      ("scores", {}, "different splits"),
      ("sentences/long", [[4, 4, 4, 3, 2, 1, 0]], "different splits"),
      ("sentences/test", [], "seven whole numbers"),
      ("sentences/test", [[1, 2, 3]], "seven whole numbers"),
      ("sentences/test", [[9, 9, 9, 9.5, 8, 7, 6]], "seven whole numbers"),
      ("sentences/test", [[1, 2], [1]], "sentences of test"),
    ],
  )
  def test_a_record_that_is_not_what_it_says(self, call, tmp_path, records, path, value, words):
    write_runs(tmp_path, [*records[:3], change(records[3], path, value)])
    self.refused(call, tmp_path, "table1.jsonl, line 4: ", words)

  @pytest.mark.parametrize(
    "path, value, words",
    [
      ("seed", 7, "its seed is 7, its config's 0"),
      ("config/seed", 7, "its seed is 0, its config's 7"),
      ("config/model.width", 64, ", its config's '{digest}'"),
      ("config/model.dtype", "bfloat16", ", its config's '{digest}'"),
      ("digest", "0123456789ab", "its digest is '0123456789ab', its config's '{digest}'"),
    ],
  )
  def test_a_record_of_another_config_than_its_own(
    self, call, tmp_path, records, path, value, words
  ):
    other = change(records[3], path, value)
    write_runs(tmp_path, [*records[:3], other])
    told = words.format(digest=digest(other["config"]))
    self.refused(call, tmp_path, "table1.jsonl, line 4: ", told, "restore or delete that line")

  def test_a_run_copied_as_another_seeds(self, call, tmp_path, records):
    copied = of_config(records[5] | dict(seed=3, date="2027-01-01"), seed=3)
    write_runs(tmp_path, [*records, copied])
    self.refused(call, tmp_path, "lines 6 and 13: ", "sinusoidal", "one is a copy: delete one")

  def test_runs_that_agree_in_part_are_no_copies(self, tmp_path, records):
    """Nor those of another row, nor those that diverged from the start, which know no seed."""
    first = records[0]
    same_sentences = of_config(first | dict(seed=3, curve=records[4]["curve"][:2]), seed=3)
    same_curve = invent("table1", "relative", 4, 0.8) | dict(curve=first["curve"])
    other_row = first | dict(row="twin")
    lost = of_config(records[3] | dict(curve=[[500, None, 0.0]]))
    also_lost = of_config(lost | dict(seed=5), seed=5)
    write_runs(tmp_path, [first, same_sentences, same_curve, other_row, lost, also_lost])
    table = read_tables(tmp_path / "runs")["table1"]
    assert [len(runs) for runs in table.rows.values()] == [3, 1, 2]

  def test_a_record_without_a_key(self, call, tmp_path, records):
    last = {name: value for name, value in records[3].items() if name != "budget"}
    write_runs(tmp_path, [*records[:3], last])
    self.refused(call, tmp_path, "table1.jsonl, line 4: ", "'budget'")

  def test_records_of_an_unknown_task_alone_are_named(self, call, tmp_path, records):
    write_runs(tmp_path, [change(record, "config/task", "speech") for record in records[:2]])
    self.refused(call, tmp_path, "table1.jsonl, line 1: ", "config.task is 'speech'")

  @pytest.mark.parametrize(
    "path, value, words",
    [
      ("commit", "0123456789abcdef" + 24 * "0" + "-dirty", "commit 0123456789ab-dirty, not"),
      ("commit", "f" * 40, "commit ffffffffffff, not 0123456789ab"),
      ("commit", None, "commit unknown, not 0123456789ab"),
      ("budget/updates", 3000, "updates 3,000, not 1,500"),
      ("budget/tokens_per_update", 8192, "tokens 8,192, not 1,024"),
      ("hardware", "1 x NVIDIA H100, 16 cores of x", "devices 1 x NVIDIA H100, not 1 x cpu"),
      ("scores/test/signatures/sacrebleu", "tok:13a", "BLEU tok:13a"),
      ("config/model.width", 64, "config.model.width 64, not 128"),
      ("config/model.dtype", "bfloat16", 'config.model.dtype "bfloat16", not unset'),
    ],
  )
  def test_another_setting_is_set_apart_by_name_and_in_no_number(
    self, tmp_path, records, alone, path, value, words
  ):
    other = of_config(change(invent("table1", "relative", 3, 0.2), path, value))
    text = text_of(tmp_path, [*records, other])
    (line,) = [line for line in text.splitlines() if line.startswith("- ")]
    assert line.startswith("- relative, seed 3: ") and words in line
    paragraph = f"Set apart, and in no number here:\n\n{line}\n\n"
    assert text.replace(paragraph, "") == alone

  def test_other_test_sentences_are_set_apart(self, tmp_path, records):
    other = invent("table1", "relative", 3, 0.8, num_sentences=200)
    text = text_of(tmp_path, [*records, other])
    assert "- relative, seed 3: sentences 200 of test (" in text
    other = invent("table1", "relative", 3, 0.8)
    for sentence in other["sentences"]["test"]:
      sentence[0] += 1
    text = text_of(tmp_path, [*records, other])
    assert "- relative, seed 3: sentences 300 of test (" in text

  def test_more_cores_are_no_other_setting(self, tmp_path, records):
    records = [change(records[0], "hardware", "1 x cpu, 2 cores of AMD EPYC"), *records[1:]]
    text = text_of(tmp_path, records)
    assert "Set apart" not in text
    assert "1 x cpu, 2 cores of AMD EPYC, 1 x cpu, 4 cores of AMD EPYC" in text

  def test_of_two_settings_the_one_with_more_runs_makes_the_table_and_then_the_later(
    self, tmp_path, records
  ):
    early = [record | dict(commit="e" * 40, date="2026-01-01") for record in records[:6]]
    write_runs(tmp_path, [*early, *records[6:]])
    table = read_tables(tmp_path / "runs")["table1"]
    assert table.records() and {r["commit"] for r in table.records()} == {records[0]["commit"]}
    assert len(table.apart) == 6

  def test_a_folder_that_cannot_be_written(self, call, tmp_path, records):
    write_runs(tmp_path, records)
    (tmp_path / "report").write_text("a file")
    self.refused(call, tmp_path, f"cannot write into {tmp_path}", "--results")


def test_the_command_says_where_the_report_is(call, tmp_path, records):
  answer = call("report", f"--results={write_runs(tmp_path, records)}")
  assert (answer.status, answer.out, answer.err) == (0, f"{tmp_path}/report.md\n", "")


def test_the_papers_columns_agree_with_one_another():
  """As the report's sentences need it; and k = 16, k = 0 of Table 2 are runs of Table 3."""
  tables = {name: paper.published(name) for name in ("table1", "table2", "table3")}
  for table in tables.values():
    orders = {
      tuple(sorted(column, key=lambda row: -column[row])) for column in table.columns.values()
    }
    assert len(orders) == 1
  (by_k,), (by_side,) = tables["table2"].columns.values(), tables["table3"].columns.values()
  assert by_k["k=16"] == by_side["keys and values"] and by_k["k=0"] == by_side["neither"]


def test_the_report_that_is_committed_is_that_of_its_records(tmp_path):
  if not list(RESULTS.glob("runs/*.jsonl")):
    pytest.skip("no raw results are committed yet: results/runs/*.jsonl")
  shutil.copytree(RESULTS / "runs", tmp_path / "runs")
  rebuilt = report.write(tmp_path).read_text(encoding="utf-8")
  assert rebuilt == (RESULTS / "report.md").read_text(encoding="utf-8")
  assert all((RESULTS / name).exists() for name in pictures_in(rebuilt))
