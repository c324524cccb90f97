"""The report on graphs: every number is that of the raw records."""

import collections
import json
import pathlib
import re

import numpy as np
import pytest
from test_sweep_report import invent_sweep, tables_in

from configs import graph
from experiments.reports import captions, graph_chains, graphs
from experiments.tasks.graph_scores import CTP, DIFFERENT_LONGEST, GRAPHS, GUESSED_LONGEST
from relpos_jax.data import clutrr

# Chance of a right answer at 2 relations; it falls by 2% with each more.
ROWS = {"keys and values": 0.98, "keys": 0.9, "none": 0.15, "unstructured": 0.15}
SIZES = {"valid": (2, 3, 4)} | {f"test_{k}": (k,) for k in range(2, 11)}
SIZES_OF_FOLDS = dict(valid=(10, 14), test=(12,))


def invent(sweep: str, row: str, seed: int, chance: float, sizes, **config):
  """The record of a run that never was."""
  random = np.random.default_rng([seed, *map(ord, row)])
  number = lambda split: 20 + len(split) % 3 + 5 * (split == "test_10")
  sentences = {
    split: [
      [size, int(random.random() < chance - (size - 2) / 50)]
      for size in of
      for _ in range(number(split))
    ]
    for split, of in sizes.items()
  }
  fold = seed if "data.source" in config else 0
  scores = {
    split: dict(accuracy=100 * np.mean(rows, axis=0)[1], loss=1.5 - chance, majority=7.0 + fold)
    for split, rows in sentences.items()
  }
  return dict(
    **dict(sweep=sweep, row=row, seed=seed, digest=f"{sweep}{row}{seed}"),
    config={"task": "graphs", "seed": seed, **config},
    **dict(commit="0123456789abcdef" + 24 * "0", date="2026-11-21T10:00:00+00:00"),
    **dict(hardware="1 x cpu, 1 cores of AMD EPYC", packages=dict(python="3.11.7", jax="0.10.2")),
    budget=dict(updates=1030, tokens_per_update=640, minutes=1.5, tokens_per_second=None),
    **dict(scores=scores, sentences=sentences),
    curve=[[1030, 1.5 - chance, scores["valid"]["accuracy"]]],
  )


def invent_chains():
  return [invent("graph-clutrr", row, seed, ROWS[row], SIZES) for seed in range(3) for row in ROWS]


def invent_folds(number=5, **config):
  config = {"data.source": "tu", **config}
  return [
    invent("graph-tu", row, fold, chance, SIZES_OF_FOLDS, **config)
    for fold in range(number)
    for row, chance in {"keys and values": 0.95, "none": 0.85}.items()
  ]


def write_runs(folder: pathlib.Path, *sweeps) -> pathlib.Path:
  (folder / "runs").mkdir()
  for records in sweeps:
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "runs" / f"{records[0]['sweep']}.jsonl").write_text(text, encoding="utf-8")
  return folder


def spread(values, digits=1) -> str:
  return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """The folder of a report on both kinds of graphs."""
  folder = write_runs(tmp_path_factory.mktemp("results"), invent_chains(), invent_folds())
  graphs.write(folder)
  return folder


@pytest.fixture(scope="module")
def text(written):
  return (written / "graphs.md").read_text(encoding="utf-8")


def of_row(records, row: str, of):
  return [of(record) for record in records if record["row"] == row]


def test_every_system_is_said_to_be_something(text):
  rows = {row for row, _ in graph.sweep()}
  said = dict(re.findall(r"^- ([^:\n]*): (.+)$", text, re.MULTILINE))
  assert said == graph.systems() and {*said} == rows


@pytest.mark.parametrize("number, told", [
  (1, "Valid loss and scores are of the parameters after the last update."),
  (5, "Valid loss and learning curves are of the parameters after an update, scores of the mean of "
      "the last 5 checkpoints."),
])  # fmt: skip
def test_of_which_parameters_numbers_are(number, told):
  record = dict(config={"task": "graphs", "decoding.average_checkpoints": number})
  assert captions.of_which([record, record]) == told


def test_how_settings_were_chosen_is_not_told_of_runs_that_nobody_knows(text):
  assert "chosen" not in text


def test_chains_have_the_mean_and_deviation_of_their_seeds(text):
  records, (table, lengths, _) = invent_chains(), tables_in(text)
  longest = lambda r: 100 * np.mean([ok for size, ok in r["sentences"]["valid"] if size == 4])
  longer = lambda r: (
    100 * np.mean([ok for k in range(5, 11) for _, ok in r["sentences"][f"test_{k}"]])
  )
  for row, cells in zip(ROWS, table, strict=False):
    assert cells[""] == row and cells["seeds"] == "0, 1, 2"
    assert cells["valid, 4"] == spread(of_row(records, row, longest))
    assert cells["test, 5 to 10"] == spread(of_row(records, row, longer))
    assert cells["valid loss"] == spread([1.5 - ROWS[row]] * 3, 3)
  by_name = {cells[""]: cells for cells in lengths}
  for k in range(2, 11):
    (column,) = [name for name in lengths[0] if name.startswith(f"{k} (")]
    accuracy = of_row(records, "keys", lambda r, k=k: r["scores"][f"test_{k}"]["accuracy"])
    assert by_name["keys"][column] == spread(accuracy)
    assert by_name["CTP, published"][column] == f"{CTP[k]:.1f}"
    assert by_name["most frequent class in training"][column] == "7.0"


def test_what_there_is_no_number_of_is_a_dash_and_no_claim(tmp_path, monkeypatch):
  monkeypatch.setattr(graph_chains, "spread_curves", lambda panels, path: path)
  sizes = SIZES | dict(valid=(2, 3))
  records = [invent("graph-clutrr", row, seed, ROWS[row], sizes) for seed in (0, 1) for row in ROWS]
  records[0]["curve"] = [[1030, None, None]]
  text = graphs.write(write_runs(tmp_path, records)).read_text("utf-8")
  table = {cells[""]: cells for cells in tables_in(text)[0]}
  assert {table[row]["valid, 4"] for row in ROWS} == {"-"}
  assert table["keys"]["valid, 4: below keys and values"] == "-"
  assert table["keys and values"]["valid loss"] == f"{1.5 - 0.98:.3f} (1 not finite)"
  assert "- keys and values, seed 0: 1 of 1 evaluations\n" in text
  assert "dge labels" not in text.partition("\n## ")[2] and "nan" not in text


def test_a_gain_is_claimed_beyond_the_spread_alone(text):
  chains, folds = text.split("## ")[1:]
  assert "Edge labels gain: on valid chains of 4, keys and values have" in chains
  records = invent_chains()
  longest = lambda r: 100 * np.mean([ok for size, ok in r["sentences"]["valid"] if size == 4])
  gains = np.subtract(*(of_row(records, row, longest) for row in ("keys and values", "none")))
  half_width = 4.30265 * np.std(gains, ddof=1) / np.sqrt(3)
  told = f"over none {np.mean(gains):+.2f} ± {half_width:.2f} (beyond the spread)"
  assert told in chains
  assert "A gain from edge labels is not shown: on test, keys and values have" in folds
  assert re.search(r"over none \+.* \(inside the spread\)", folds)


def test_folds_are_compared_each_with_itself(text):
  records, (*_, table) = invent_folds(), tables_in(text)
  accuracy = lambda r: r["scores"]["test"]["accuracy"]
  ours, blind = (of_row(records, row, accuracy) for row in ("keys and values", "none"))
  half_width = 2.77645 * np.std(np.subtract(ours, blind), ddof=1) / np.sqrt(5)
  assert table[0]["test"] == spread(ours) and table[0]["folds"] == "5 of 10"
  assert table[0]["test: above none"] == f"{np.mean(ours) - np.mean(blind):+.2f} ± {half_width:.2f}"
  assert table[2]["test"] == spread([7.0 + fold for fold in range(5)])


@pytest.mark.parametrize(
  "number, config, told",
  [(4, {"data.tu.fold": 3}, "1 of 10, 4 runs"), (12, {}, "10 of 10, 12 runs")],
)
def test_runs_of_one_fold_are_no_folds(tmp_path, number, config, told):
  text = graphs.write(write_runs(tmp_path, invent_folds(number, **config))).read_text("utf-8")
  (table,) = tables_in(text)
  assert {row["folds"] for row in table[:-1]} == {told}
  assert table[-1]["folds"] == told.partition(",")[0]
  assert "each seed has its own" not in text and "some seeds share one" in text


def test_rows_that_are_one_model_are_told(tmp_path):
  records = invent_folds()
  twins = [r | dict(row="undirected") for r in records if r["row"] == "keys and values"]
  folder = write_runs(tmp_path, [*records, *twins])
  assert "Undirected is keys and values here" in graphs.write(folder).read_text("utf-8")
  twins[0] = invent("graph-tu", "undirected", 0, 0.5, SIZES_OF_FOLDS, **{"data.source": "tu"})
  (tmp_path / "other").mkdir()
  folder = write_runs(tmp_path / "other", [*records, *twins])
  assert "Undirected" not in graphs.write(folder).read_text("utf-8")


def apart_in(text: str) -> list[str]:
  """In the sections; the list before them is of systems."""
  return [line for line in text.partition("\n## ")[2].splitlines() if line.startswith("- ")]


@pytest.mark.parametrize("change", [
  lambda r: [row.__setitem__(0, row[0] + 1) for row in r["sentences"]["test"]],
  lambda r: r["scores"]["valid"].update(majority=50.0),
])  # fmt: skip
def test_a_fold_of_other_graphs_is_set_apart(tmp_path, change):
  records = invent_folds()
  twins = [r | dict(row="keys") for r in invent_folds() if r["row"] == "none"]
  change(twins[2])
  text = graphs.write(write_runs(tmp_path, [*records, *twins])).read_text("utf-8")
  (line,) = apart_in(text)
  assert line.startswith("- keys, seed 2: graphs 21 of test (") and "not 21 of test (" in line
  assert [row["folds"] for row in tables_in(text)[0]] == ["5 of 10"] * 2 + ["4 of 10", "5 of 10"]


@pytest.mark.parametrize(
  "config, told",
  [
    ({"data.tu.fold": 3}, "fold 3, not the seed's"),
    ({"data.tu.num_folds": 5}, "folds 5, not 10"),
    ({"data.tu.name": "Mutagenicity"}, "data Mutagenicity, not MUTAG"),
  ],
)
def test_a_run_on_other_folds_is_set_apart(tmp_path, config, told):
  other = invent("graph-tu", "keys", 1, 0.9, SIZES_OF_FOLDS, **{"data.source": "tu"}, **config)
  text = graphs.write(write_runs(tmp_path, [*invent_folds(), other])).read_text("utf-8")
  assert apart_in(text) == [f"- keys, seed 1: {told}"]


def test_chains_of_other_graphs_are_set_apart(tmp_path, monkeypatch):
  monkeypatch.setattr(graph_chains, "spread_curves", lambda panels, path: path)
  records = invent_chains()
  records[5]["scores"]["test_4"]["majority"] = 9.0
  (line,) = apart_in(graphs.write(write_runs(tmp_path, records)).read_text("utf-8"))
  assert line.startswith("- keys, seed 1: graphs 26 of test_10 (")


def test_different_graphs_are_as_many_as_are_told(shared_data):
  """By what tells a graph to be valid; and which test graphs are in training."""
  rows = clutrr._rows_of_graphs(shared_data / "clutrr" / clutrr._GRAPHS)
  known = {split: [(known_by(row), len(row["labels"])) for row in of] for split, of in rows.items()}
  everything = known.pop("train")
  train, valid = ([x for x in everything if (x[0] < 0.1) == wanted] for wanted in (False, True))
  known["valid"] = valid
  assert {split: (len(of), len({*of})) for split, of in known.items()} == GRAPHS
  assert len({x for x in valid if x[1] == 4}) == DIFFERENT_LONGEST
  assert {*known["test_2"]} <= {*train}
  assert not any({*train} & {*of} for split, of in known.items() if split != "test_2")


def test_the_guess_is_right_as_often_as_is_told(shared_data):
  """Among valid chains of 4, of which records have no classes."""
  rows = clutrr._rows_of_graphs(shared_data / "clutrr" / clutrr._GRAPHS)["train"]
  is_valid = [known_by(row) < 0.1 for row in rows]
  trained = (row["target"] for row, valid in zip(rows, is_valid, strict=True) if not valid)
  guess = collections.Counter(trained).most_common(1)[0][0]
  valid = [row for row, wanted in zip(rows, is_valid, strict=True) if wanted]
  right = {k: sum(row["target"] == guess for row in valid if len(row["labels"]) == k)
           for k in (2, 3, 4)}  # fmt: skip
  assert right[4] == GUESSED_LONGEST
  assert sum(right.values()) == 139  # of 1,544 are the 9.0% that the records have


def known_by(row) -> float:
  labels = map(clutrr.RELATIONS.index, row["labels"])
  edges = [(*edge, label) for edge, label in zip(row["edges"], labels, strict=True)]
  item = dict(edges=np.array(edges), query=np.array(row["query"]), target=np.int32(0))
  return clutrr._number(clutrr._graph(item))


def test_different_graphs_are_told_of_the_data_that_were_counted(text, request):
  committed = (request.config.rootpath / "results" / "graphs.md").read_text("utf-8")
  assert "| 2 (38; 2) | 3 (107; 7) | 4 (77; 36) | 5 (185; 185) |" in committed
  assert "(247 different graphs; of 4 relations 535 rows, 208 graphs)" in committed
  guess = tables_in(committed)[0][-1]
  assert (guess["valid"], guess["valid, 4"]) == ("9.0", f"{100 * GUESSED_LONGEST / 535:.1f}")
  assert "different graphs" not in text and "training, too" not in text
  assert tables_in(text)[0][-1]["valid, 4"] == "-"


def test_each_task_has_its_own_report(call, written, tmp_path):
  answer = call("report", f"--results={written}")
  assert (answer.status, answer.out) == (0, f"{written}/graphs.md\n")
  assert not (written / "report.md").exists()
  sizes = [(written / "graphs" / "graph-clutrr-lengths.png").stat().st_size]
  mixed = write_runs(tmp_path, invent_chains(), invent_sweep("table1", dict(relative=0.8), 1))
  answer = call("report", f"--results={mixed}")
  assert (answer.status, answer.out) == (0, f"{mixed}/report.md\n{mixed}/graphs.md\n")
  assert "CLUTRR" not in (mixed / "report.md").read_text() and sizes[0] > 10_000


@pytest.mark.parametrize(
  "change, words",
  [
    (lambda r: r["scores"]["valid"].update(accuracy=99.0), "line 2: the graphs of valid give"),
    (lambda r: r["scores"]["valid"].update(accuracy=float("nan")), "give accuracy"),
    (lambda r: r["scores"]["valid"].pop("loss"), "line 2: no number 'loss'"),
    (lambda r: r["sentences"].update(valid=[[1]]), "line 2: the graphs of valid are not two"),
    (lambda r: r["sentences"].pop("valid"), "line 2: its scores and its sentences are of"),
  ],
)
def test_a_record_that_is_not_what_it_says_is_one_line(call, tmp_path, change, words):
  records = invent_folds()
  change(records[1])
  answer = call("report", f"--results={write_runs(tmp_path, records)}")
  assert (answer.status, answer.err.count("\n")) == (2, 1) and words in answer.err, answer


def test_the_committed_report_is_that_of_the_committed_records(tmp_path, request):
  results = request.config.rootpath / "results"
  files = [*(results / "runs").glob("graph-*.jsonl")]
  if not files:
    pytest.skip("no records of graphs are committed")
  (tmp_path / "runs").mkdir()
  for file in files:
    (tmp_path / "runs" / file.name).write_text(file.read_text())
  assert graphs.write(tmp_path).read_text() == (results / "graphs.md").read_text()
