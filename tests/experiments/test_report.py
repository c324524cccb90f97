"""The numbers of pages equal those of the raw records, and wrong records are refused."""

import copy
import functools
import json
import pathlib
import re
import shutil
from unittest import mock

import numpy as np
import pytest
import scipy.stats

from experiments import report, sections
from experiments.errors import InputError
from experiments.evaluation.records import read_records
from experiments.graphs import scores as graphs

RESULTS = pathlib.Path(__file__).parents[2] / "results"


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
  """Skips drawing, which takes most of the time, except where it is tested."""
  if "pictures" not in request.node.name:
    for module in (sections, graphs):
      monkeypatch.setattr(module, "spread_curves", lambda panels, path, **_: path)
    monkeypatch.setattr(sections, "small_multiples", lambda panel, path, **_: path)


@functools.cache
def committed(sweep: str) -> list[dict]:
  """Returns the records of a sweep, read-only."""
  return read_records(RESULTS / "runs" / f"{sweep}.jsonl.xz")


def write_runs(folder: pathlib.Path, sweep: str, records) -> pathlib.Path:
  """Writes a results folder with the records of a sweep."""
  (folder / "runs").mkdir(exist_ok=True)
  text = "".join(json.dumps(record) + "\n" for record in records)
  (folder / "runs" / f"{sweep}.jsonl").write_text(text, encoding="utf-8")
  return folder


def tables_of(page: pathlib.Path, *blocks: str) -> dict[str, dict[str, dict[str, str]]]:
  """Returns the cells in blocks of a page by table's first head, row and column."""
  text = page.read_text("utf-8")
  found, head = {}, None
  for block in blocks:
    for line in re.search(f"<!-- begin {block} -->(.*?)<!-- end", text, re.S)[
      1
    ].splitlines():
      cells = (
        [cell.strip() for cell in line.strip("|").split("|")]
        if line[:1] == "|"
        else None
      )
      if cells and head is None:
        found[cells[0]] = {}
      elif cells and cells[0] != "---":
        found[head[0]][cells[0]] = dict(zip(head[1:], cells[1:], strict=True))
      head = cells and (head or cells)
  return found


def of_rows(sweep: str, value) -> dict[str, list[float]]:
  """Returns a value of each run, by row in the order of seeds."""
  rows = {}
  for record in sorted(committed(sweep), key=lambda record: record["seed"]):
    rows.setdefault(record["row"], []).append(value(record))
  return rows


def interval(values, digits: int = 2) -> str:
  mean = f"{np.mean(values):.{digits}f}"
  if len(values) == 1:
    return mean
  half_width = scipy.stats.t.ppf(0.975, len(values) - 1) * scipy.stats.sem(values)
  return f"{mean} ± {half_width:.{digits}f}"


def test_scores_of_translation_are_those_of_the_seeds():
  tables = tables_of(RESULTS / "report.md", "table1")
  scores = of_rows("table1", lambda run: run["scores"]["test"]["sacrebleu"])
  papers = of_rows("table1", lambda run: run["scores"]["test"]["paper_bleu"])
  losses = of_rows("table1", lambda run: run["curve"][-1][1])
  pairs = tables["sacreBLEU of test, row - column"]
  for row, cells in tables["table1"].items():
    assert cells["seeds"] == "0, 1, 2, 3, 4"
    assert cells["valid loss"] == interval(losses[row], 3)
    assert cells["sacreBLEU"] == interval(scores[row])
    assert cells["paper's BLEU"] == interval(papers[row])
    for other in {*scores} - {row}:
      difference = f"{np.mean(scores[row]) - np.mean(scores[other]):+.2f}"
      assert pairs[row][other].removeprefix("**").startswith(f"{difference} ± ")
  assert (
    pairs["relative"]["none"].startswith("**") and "**" not in pairs["relative"]["both"]
  )


def test_the_guide_to_positions_has_the_scores_and_the_differences_of_the_results():
  guide = RESULTS.parent / "docs/positions.md"
  lines = [line for line in guide.read_text("utf-8").splitlines() if line[:1] == "|"]
  head, _, *rows = (
    [cell.strip() for cell in line.strip("|").split("|")] for line in lines
  )
  corpora = [
    ("positions-multi30k", "BLEU, Multi30k", "sacreBLEU", "sacreBLEU of test"),
    ("positions-chorales", "nats, chorales", "valid, a token", "valid, a token"),
  ]
  assert len(rows) == 10
  for sweep, title, score, compared in corpora:
    tables = tables_of(RESULTS / "positions.md", sweep)
    differences = tables[f"{compared}, row - column"]
    column = head.index(title)
    assert head[column + 1] == "less `relative`'s"
    for row in rows:
      name = row[0].split("`")[1]
      assert row[column] == tables[sweep][name][score]
      assert row[column + 1] == differences[name]["relative"]


def test_exact_matches_are_compared_at_a_level_and_by_length():
  tables = tables_of(RESULTS / "lengths.md", "lengths-scan")
  level, free, given = (
    tables[f"lengths-scan: {x}"]
    for x in ("valid first at 90%", "EOS free", "length given")
  )
  for row, runs in of_rows("lengths-scan", lambda run: run["exact"]).items():
    firsts = [next((step for step, x in run["valid"] if x >= 90), None) for run in runs]
    reached = [(run, first) for run, first in zip(runs, firsts, strict=True) if first]
    assert level[row]["reached"] == f"{len(reached)} of {len(runs)}"
    for split in ("valid", "test", "within"):
      exact = [dict(run[split])[first] for run, first in reached]
      assert level[row][split] == (interval(exact, 1) if exact else "-")

  def exact(ending, start, end):
    def of_run(run):
      rows = np.concatenate([run["sentences"][x + ending] for x in ("test", "within")])
      inside = rows[(rows[:, 0] >= start) & (rows[:, 0] <= end)]
      return len(inside), 100 * inside[:, -1].mean()

    return of_rows("lengths-scan", of_run)

  for table, ending in ((free, ""), (given, "_given")):
    *_, bands = (cells.keys() - {"valid"} for cells in table.values())
    assert len(bands) == 6
    for band in bands:
      start, end, number = map(int, re.findall(r"\d+", band.replace(",", "")))
      for row, found in exact(ending, start, end).items():
        assert {size for size, _ in found} == {number}
        assert table[row][band] == interval([score for _, score in found], 1)


def test_every_score_of_every_test_set_has_a_column_unless_records_are_older(tmp_path):
  records = copy.deepcopy(committed("table1"))
  for record in records:
    for of in (record["scores"], record["sentences"]):
      of["long"] = copy.deepcopy(of["test"])
    for number, scores in enumerate(record["scores"].values()):
      scores |= dict(chrf=50.0 + number + record["seed"], exact=10.0 + number)
  report.main(write_runs(tmp_path, "table1", records))
  cells = tables_of(tmp_path / "report.md", "table1")["table1"]["none"]
  assert cells["chrF"] == interval([50, 51, 52, 53, 54])
  assert cells["chrF, long"] == interval([51, 52, 53, 54, 55])
  assert (cells["exact (%)"], cells["exact (%), long"]) == (
    "10.00 ± 0.00",
    "11.00 ± 0.00",
  )
  del records[0]["scores"]["test"]["chrf"]
  write_runs(tmp_path, "table1", records)
  report.main(tmp_path)
  cells = tables_of(tmp_path / "report.md", "table1")["table1"]["none"]
  assert "chrF" not in cells and "chrF, long" in cells


def test_accuracies_of_graphs_are_those_of_the_seeds():
  tables = tables_of(RESULTS / "graphs.md", "graph-clutrr")
  longest = lambda run: (
    100 * np.mean([ok for k, ok in run["sentences"]["valid"] if k == 4])
  )
  longer = lambda run: (
    100 * np.mean([ok for k in range(5, 11) for _, ok in run["sentences"][f"test_{k}"]])
  )
  six = of_rows("graph-clutrr", lambda run: run["scores"]["test_6"]["accuracy"])
  by_length = tables["test, relations (graphs)"]
  for row in six:
    cells = tables["graph-clutrr"][row]
    assert cells["valid, 4"] == interval(of_rows("graph-clutrr", longest)[row], 1)
    assert cells["test, 5 to 10"] == interval(of_rows("graph-clutrr", longer)[row], 1)
    assert by_length[row]["6 (105; 105)"] == interval(six[row], 1)
  assert by_length["CTP, published"]["6 (105; 105)"] == f"{graphs.CTP[6]:.1f}"
  guess = tables["graph-clutrr"]["most frequent class in training"]
  assert (guess["valid"], guess["valid, 4"]) == ("9.0", "-")
  gains = np.subtract(
    *(of_rows("graph-clutrr", longest)[row] for row in ("keys", "none"))
  )
  assert tables["valid, 4, row - column"]["keys"]["none"] == f"**+{interval(gains)}**"


def test_a_fold_may_have_more_updates_in_all_rows(tmp_path):
  records = copy.deepcopy(committed("graph-tu"))
  (page,) = report.main(write_runs(tmp_path, "graph-tu", records))
  assert "\n- updates: 120, 160\n" in page.read_text("utf-8")
  records[-1]["budget"]["updates"] += 40
  write_runs(tmp_path, "graph-tu", records)
  with pytest.raises(InputError, match="not the same budget as line"):
    report.main(tmp_path)


def test_likelihoods_of_music_are_those_of_the_seeds_that_did_not_diverge(tmp_path):
  records = copy.deepcopy(committed("music"))
  of = of_rows("music", lambda run: run["scores"]["valid"]["nll"])
  lost = next(run for run in records if (run["row"], run["seed"]) == ("sinusoidal", 2))
  lost["scores"]["valid"]["nll"] = lost["sentences"]["valid"][0][1] = float("nan")
  of["sinusoidal"].pop()
  (page,) = report.main(write_runs(tmp_path, "music", records))
  tables = tables_of(page, "music")
  cells = {row: cells["valid, a token"] for row, cells in tables["music"].items()}
  assert cells["relative"] == interval(of["relative"], 3)
  assert cells["sinusoidal"] == f"{interval(of['sinusoidal'], 3)} (1 not finite)"
  above = np.mean(of["relative"]) - np.mean(of["sinusoidal"])
  pair = tables["valid, a token, row - column"]["relative"]["sinusoidal"]
  assert pair.removeprefix("**").startswith(f"{above:+.3f} ± ")


def test_hand_written_text_stays_and_pictures_are_drawn(tmp_path):
  page = tmp_path / "report.md"
  page.write_text(
    "Ours.\n<!-- begin table3 -->\nold\n<!-- end table3 -->\nA conclusion.\n"
  )
  report.main(write_runs(tmp_path, "table3", committed("table3")))
  text = page.read_text("utf-8")
  assert (
    text.startswith("Ours.\n<!-- begin table3 -->\n```\npython -m")
    and "old" not in text
  )
  assert "<!-- end table3 -->\nA conclusion.\n" in text
  (picture,) = re.findall(r"\]\((.*?)\)", text)
  assert (tmp_path / picture).stat().st_size > 10_000


@pytest.mark.parametrize("sweep, title, kind", [
  ("table1", "multi30k, 5 seeds", "spread_curves"),
  ("positions-multi30k", "multi30k, 5 seeds", "small_multiples"),
  ("positions-chorales", "chorales, 3 seeds", "small_multiples"),
  ("sharing", "multi30k, 2 to 3 seeds", "spread_curves"),
  ("music-long", "chorales, 1 seed", "spread_curves"),
  ("graph-clutrr", "clutrr, 5 seeds", "spread_curves"),
  ("lengths-scan", "scan, 5 seeds", "spread_curves"),
])  # fmt: skip
def test_a_picture_names_its_data_and_seeds(tmp_path, monkeypatch, sweep, title, kind):
  draw = mock.Mock(side_effect=lambda panels, path, **_: path)
  module = graphs if sweep.startswith("graph") else sections
  monkeypatch.setattr(module, kind, draw)
  report.main(write_runs(tmp_path, sweep, committed(sweep)))
  assert draw.call_args.kwargs["title"].startswith(title)


@pytest.mark.parametrize(
  "change, words",
  [
    (lambda r: r.update(row="relative"), "a second record of 'relative', seed 1"),
    (lambda r: _shift(r), "not the same data as line 1"),
    (lambda r: r["budget"].update(updates=3000), "not the same budget as line 1"),
    (
      lambda r: r["config"].update({"model.width": 64}),
      "not the same config as line 2",
    ),
    (lambda r: r.update(recipe=1), "not the same recipe as line 1"),
  ],
)
def test_a_wrong_record_is_one_line(call, tmp_path, change, words):
  records = copy.deepcopy(committed("table1"))
  change(records[5])
  folder = write_runs(tmp_path, "table1", records)
  call("report", f"--results={folder}").assert_refused(f"table1.jsonl, line 6: {words}")
  assert not (folder / "report.md").exists()


def _shift(record):
  """Changes the lengths of the test sentences, and so the data, but no score."""
  for sentence in record["sentences"]["test"]:
    sentence[0] += 1


def test_the_committed_pages_match_the_committed_records(tmp_path):
  names = ("runs", "report.md", "graphs.md", "music.md", "positions.md", "lengths.md")
  for name in names:
    (shutil.copytree if "." not in name else shutil.copy)(
      RESULTS / name, tmp_path / name
    )
  report.main(tmp_path)
  for name in names[1:]:
    assert (tmp_path / name).read_text("utf-8") == (RESULTS / name).read_text("utf-8")
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", (RESULTS / name).read_text("utf-8"))
    assert all((RESULTS / picture).exists() for picture in pictures)


INTERVALS, FIGURES = (
  r"\d+\.\d+ ± \d+\.\d+",
  r"(?<![\w.:/])\d+\.\d+(?: ± \d+\.\d+)?(?!\d)",
)


@pytest.mark.parametrize("page, pattern, own", [
  # The paper's keys over values, published, and the difference to it.
  ("results/report", FIGURES, {"0.5", "41.02", "0.4", "42.13"}),
  ("results/graphs", FIGURES, {"3.1"}),
  # Published, differences to these, and a flag.
  ("results/music", FIGURES, {"0.417", "0.37", "0.035", "0.95"}),
  ("README", INTERVALS, {}),
  ("docs/positions", INTERVALS, {}),
])  # fmt: skip
def test_figures_in_the_text_of_a_page_occur_in_its_tables_or_those_of_results(
  page, pattern, own
):
  text = (RESULTS.parent / f"{page}.md").read_text("utf-8").partition("## Memory")[0]
  blocks = re.compile(r"<!-- begin (.*?) -->.*?<!-- end \1 -->", re.DOTALL)
  figures = re.findall(pattern, blocks.sub("", text))
  tables = "".join(match[0] for match in blocks.finditer(text))
  if not tables:
    tables = "".join(page.read_text("utf-8") for page in RESULTS.glob("*.md"))
  assert (
    len(figures) > 1 and [x for x in figures if x not in tables and x not in own] == []
  )


def test_the_command_above_a_table_has_the_changes_of_the_command_line(tmp_path):
  records = copy.deepcopy(committed("table1"))
  records = [record for record in records if record["seed"] in (1, 2)]
  for record in records:
    record["config"]["model.width"] = 64
  own = [
    {**record, "sweep": "mine", "row": f"my {record['row']}"} for record in records
  ]
  write_runs(tmp_path, "mine", own)
  (page,) = report.main(write_runs(tmp_path, "table1", records))
  table1, mine = sorted(page.read_text("utf-8").split("<!-- begin ")[1:], reverse=True)
  assert table1.startswith(
    "table1 -->\n```\npython -m experiments.sweep --config=configs/table1.py --seeds=2 "
    "--config.model.width=64 --config.seed=1 --results=mine\n```\n\n8 trainings, "
  )
  assert mine.startswith("mine -->\n8 trainings, ")  # its config is not in configs/
