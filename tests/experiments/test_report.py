"""The numbers of pages follow from the raw records; wrong records are refused."""

import copy
import functools
import pathlib
import re
import shutil

import numpy as np
import pytest
import scipy.stats

from experiments import report, sections
from experiments.evaluation.records import read_records, write_records
from experiments.graphs import scores as graphs

RESULTS = pathlib.Path(__file__).parents[2] / "results"


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
  """Skips drawing, which takes most of the time, except where it is tested."""
  if "pictures" not in request.node.name:
    for module in (sections, graphs):
      monkeypatch.setattr(module, "spread_curves", lambda panels, path, *_, **__: path)


@functools.cache
def committed(sweep: str) -> list[dict]:
  """Returns the records of a sweep, read-only."""
  return read_records(RESULTS / "runs" / f"{sweep}.jsonl.xz")


def write_runs(folder: pathlib.Path, sweep: str, records) -> pathlib.Path:
  """Writes a results folder with the records of a sweep."""
  (folder / "runs").mkdir()
  write_records(folder / "runs" / f"{sweep}.jsonl", records)
  return folder


def cells_of(line: str) -> list[str]:
  return [cell.strip() for cell in line.strip("|").split("|")]


def tables_of(page: pathlib.Path, section: str) -> dict[str, dict[str, dict[str, str]]]:
  """Returns the cells in a section of a page by table's first head, row and column."""
  pattern = f"<!-- begin {section} -->(.*?)<!-- end"
  text = re.search(pattern, page.read_text("utf-8"), re.DOTALL)[1]
  tables = {}
  for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
    head, _, *rows = map(cells_of, table.splitlines())
    tables[head[0]] = {
      name: dict(zip(head[1:], cells, strict=True)) for name, *cells in rows
    }
  return tables


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


def accuracy(run, lengths, *splits) -> float:
  """Returns the percentage of right answers for chains of some lengths."""
  answers = []
  for split in splits:
    answers += [right for length, right in run["sentences"][split] if length in lengths]
  return 100 * np.mean(answers)


def sacrebleu(run) -> float:
  return run["scores"]["test"]["sacrebleu"]


def valid_4(run) -> float:
  return accuracy(run, [4], "valid")


def longer(run) -> float:
  return accuracy(run, range(5, 11), *(f"test_{length}" for length in range(5, 11)))


@pytest.mark.parametrize(
  "page, sweep, column, score, digits",
  [
    ("report", "table1", "valid loss", lambda run: run["curve"][-1][1], 3),
    ("report", "table1", "sacreBLEU", sacrebleu, 2),
    ("graphs", "graph-clutrr", "valid, 4", valid_4, 1),
    ("graphs", "graph-clutrr", "test, 5 to 10", longer, 1),
  ],
)
def test_scores_are_means_of_the_seeds(page, sweep, column, score, digits):
  table = tables_of(RESULTS / f"{page}.md", sweep)[sweep]
  for row, scores in of_rows(sweep, score).items():
    assert table[row]["seeds"] == "0, 1, 2, 3, 4"
    assert table[row][column] == interval(scores, digits)


def test_differences_are_of_means_or_of_pairs_of_seeds():
  bleu = of_rows("table1", sacrebleu)
  pairs = tables_of(RESULTS / "report.md", "table1")["sacreBLEU of test, row - column"]
  difference = np.mean(bleu["relative"]) - np.mean(bleu["none"])
  assert pairs["relative"]["none"].startswith(f"**{difference:+.2f} ± ")
  assert "**" not in pairs["relative"]["both"]
  right = of_rows("graph-clutrr", valid_4)
  pairs = tables_of(RESULTS / "graphs.md", "graph-clutrr")["valid, 4, row - column"]
  gains = np.subtract(right["keys"], right["none"])
  assert pairs["keys"]["none"] == f"**+{interval(gains)}**"


@pytest.mark.parametrize(
  "sweep, title, score, compared",
  [
    ("positions-multi30k", "BLEU, Multi30k", "sacreBLEU", "sacreBLEU of test"),
    ("positions-chorales", "nats, chorales", "valid, a token", "valid, a token"),
  ],
)
def test_the_guide_to_positions_has_the_scores_and_the_differences_of_the_results(
  sweep, title, score, compared
):
  guide = (RESULTS.parent / "docs/positions.md").read_text("utf-8").splitlines()
  head, _, *rows = [cells_of(line) for line in guide if line[:1] == "|"]
  tables = tables_of(RESULTS / "positions.md", sweep)
  differences = tables[f"{compared}, row - column"]
  column = head.index(title)
  assert len(rows) == 10
  for row in rows:
    name = row[0].split("`")[1]
    wanted = [tables[sweep][name][score], differences[name]["relative"]]
    assert row[column : column + 2] == wanted


def test_exact_matches_are_compared_at_a_level():
  tables = tables_of(RESULTS / "lengths.md", "lengths-scan")
  table = tables["lengths-scan: valid first at 90%"]
  for row, runs in of_rows("lengths-scan", lambda run: run["exact"]).items():
    reached = []
    for run in runs:
      steps = [step for step, exact in run["valid"] if exact >= 90]
      if steps:
        reached.append(dict(run["test"])[steps[0]])
    assert table[row]["reached"] == f"{len(reached)} of {len(runs)}"
    assert table[row]["test"] == (interval(reached, 1) if reached else "-")


@pytest.mark.parametrize("max_length", [2, 17, 500])
def test_pictures_and_tables_of_lengths_are_made_for_any_pairs(tmp_path, max_length):
  # All test pairs are longer than in training, or some of them, or none.
  records = copy.deepcopy(committed("lengths-embedded"))
  for record in records:
    record["config"] |= {"data.source": "pairs", "batches.max_length": max_length}
  (page,) = report.main(write_runs(tmp_path, "lengths-own", records))
  tables = tables_of(page, "lengths-own")
  assert "lengths-own: valid first at 50%" in tables
  table = next(iter(tables["lengths-own: EOS free, or length given"].values()))
  shown = [[int(x) for x in re.findall(r"\d+", name)[:2]] for name in table][1:]
  lengths = [
    n for split in ("test", "long") for n, *_ in records[0]["sentences"][split]
  ]
  assert min(first for first, _ in shown) == min(lengths)
  assert max(last for _, last in shown) == max(lengths)


def test_likelihoods_of_music_are_those_of_the_seeds_that_did_not_diverge(tmp_path):
  records = copy.deepcopy(committed("music"))
  nats = of_rows("music", lambda run: run["scores"]["valid"]["nll"])
  lost = next(run for run in records if (run["row"], run["seed"]) == ("sinusoidal", 2))
  lost["scores"]["valid"]["nll"] = float("nan")
  nats["sinusoidal"].pop()
  (page,) = report.main(write_runs(tmp_path, "music", records))
  tables = tables_of(page, "music")
  table, pairs = tables["music"], tables["valid, a token, row - column"]
  wanted = f"{interval(nats['sinusoidal'], 3)} (1 not finite)"
  assert table["sinusoidal"]["valid, a token"] == wanted
  above = np.mean(nats["relative"]) - np.mean(nats["sinusoidal"])
  difference = pairs["relative"]["sinusoidal"].removeprefix("**")
  assert difference.startswith(f"{above:+.3f} ± ")


def test_pictures_are_drawn(tmp_path):
  (page,) = report.main(write_runs(tmp_path, "table3", committed("table3")))
  text = page.read_text("utf-8")
  assert re.match(r"<!-- begin table3 -->\n\d+ trainings, ", text)
  (picture,) = re.findall(r"\]\((.*?)\)", text)
  assert (tmp_path / picture).stat().st_size > 10_000


def change_data(record):
  record["sentences"]["test"][0][0] += 1  # a length: no score changes


@pytest.mark.parametrize(
  "change, words",
  [
    (lambda x: x.update(row="relative"), "a second record of 'relative', seed 1"),
    (change_data, "not the same data as line 1"),
    (lambda x: x["budget"].update(updates=3000), "not the same budget as line 1"),
    (lambda x: x.update(recipe=1), "not the same recipe as line 1"),
  ],
)
def test_a_wrong_record_is_one_line(call, tmp_path, change, words):
  records = copy.deepcopy(committed("table1"))
  change(records[5])
  folder = write_runs(tmp_path, "table1", records)
  call("report", f"--results={folder}").assert_refused(f"table1.jsonl, line 6: {words}")
  assert not (folder / "report.md").exists()


PAGES = ("report", "graphs", "music", "positions", "lengths", "length_tasks")


def test_the_committed_pages_match_the_committed_records(tmp_path):
  """Also tests that what a person wrote around the tables stays."""
  shutil.copytree(RESULTS / "runs", tmp_path / "runs")
  for page in PAGES:
    shutil.copy(RESULTS / f"{page}.md", tmp_path)
  report.main(tmp_path)
  for page in PAGES:
    text = (RESULTS / f"{page}.md").read_text("utf-8")
    assert (tmp_path / f"{page}.md").read_text("utf-8") == text
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert all((RESULTS / picture).exists() for picture in pictures)


INTERVALS = r"\d+\.\d+ ± \d+\.\d+"
FIGURES = r"(?<![\w.:/])\d+\.\d+(?: ± \d+\.\d+)?(?!\d)"


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
  assert len(figures) > 1
  assert [x for x in figures if x not in tables and x not in own] == []
