"""The numbers of reports equal those of the raw records, and wrong records are refused."""

import copy
import json
import pathlib
import re
import shutil

import numpy as np
import pytest
import sacrebleu

from experiments import report, sections
from experiments.evaluation.records import digest
from experiments.graphs import scores as graphs
from experiments.graphs.scores import CTP

RESULTS = pathlib.Path(__file__).parents[2] / "results"
STUDENT = {3: 4.30265, 2: 12.7062}  # 95% of Student's t, by the number of seeds
ROWS = dict(relative=0.8, sinusoidal=0.7, none=0.55)
CHAINS = {"keys and values": 0.98, "keys": 0.9, "none": 0.15}


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
  """Skips drawing, which takes most of the time, except where it is tested."""
  if "pictures" not in request.node.name:
    for module in (sections, graphs):
      monkeypatch.setattr(module, "spread_curves", lambda panels, path: path)


def make_record(sweep, row, seed, scores, sentences, curve, **config) -> dict:
  """Returns the record of an invented run."""
  config = config | dict(seed=seed)
  return dict(
    **dict(sweep=sweep, row=row, seed=seed, digest=digest(config), config=config),
    **dict(commit=40 * "a", date="2026-11-21T10:00:00+00:00", hardware="1 x cpu"),
    packages=dict(python="3.11.7", jax="0.10.2", flax="0.12.8"),
    budget=dict(updates=1500, tokens_per_update=1024, minutes=5.5, tokens_per_second=None),
    **dict(scores=scores, sentences=sentences, curve=curve),
  )


def bleu(sentences) -> float:
  """Computes BLEU as sacreBLEU does, from rows of counts."""
  _, hyp_len, ref_len, *correct = np.sum(sentences, axis=0).tolist()
  total = [sum(max(0, row[1] - n) for row in np.asarray(sentences).tolist()) for n in range(4)]
  return sacrebleu.BLEU.compute_bleu(correct, total, hyp_len, ref_len, "exp").score


def make_translations(sweep, rows=ROWS, num_seeds=3, **config) -> list[dict]:
  """Returns records of translations of 200 sentences; long ones have fewer matches."""
  rng = np.random.default_rng(0)
  lengths = rng.integers(4, 28, 200)
  references = lengths - rng.integers(0, 3, 200)
  signatures = dict(sacrebleu="tok:none", paper_bleu="tok:moses-de+hyphens")
  records = []
  for seed in range(num_seeds):
    for row, quality in rows.items():
      rng = np.random.default_rng([seed, *map(ord, sweep + row)])
      matches = [rng.binomial(references, quality * (1 - lengths / 200))]
      for _ in range(3):
        matches.append(rng.binomial(np.maximum(matches[-1] - 1, 0), quality))
      counts = np.stack([lengths, references, references, *matches], axis=1).tolist()
      scores = dict(sacrebleu=bleu(counts), paper_bleu=bleu(counts) + 0.1, signatures=signatures)
      curve = [[step, 4 - quality - step / 1000, quality] for step in (500, 1500)]
      data = {"data.source": "multi30k", **config}
      records.append(
        make_record(sweep, row, seed, dict(test=scores), dict(test=counts), curve, **data)
      )
  return records


@pytest.fixture(scope="module")
def table1() -> tuple[dict, ...]:
  """Returns records of two seeds, read-only."""
  return tuple(make_translations("table1", num_seeds=2))


def make_chains(num_seeds=3) -> list[dict]:
  sizes = dict(valid=(2, 3, 4), **{f"test_{k}": (k,) for k in range(2, 11)})
  records = []
  for seed, (row, chance) in ((s, item) for s in range(num_seeds) for item in CHAINS.items()):
    rng = np.random.default_rng([seed, *map(ord, row)])
    sentences = {
      split: [[k, int(rng.random() < chance)] for k in of for _ in range(20 + k)]
      for split, of in sizes.items()
    }
    scores = {
      split: dict(accuracy=100 * np.mean(of, axis=0)[1], loss=1.0, majority=7.0)
      for split, of in sentences.items()
    }
    curve = [[1500, 1.5 - chance, None]]
    records.append(make_record("graph-clutrr", row, seed, scores, sentences, curve, task="graphs"))
  return records


def make_music(num_seeds=3) -> list[dict]:
  records = []
  for seed, (row, quality) in ((s, item) for s in range(num_seeds) for item in ROWS.items()):
    rng = np.random.default_rng([seed, *map(ord, row)])
    pieces = [[400 + n, round((1 - quality) * (401 + n) + rng.normal(), 3)] for n in range(30)]
    nll = sum(nats for _, nats in pieces) / sum(tokens + 1 for tokens, _ in pieces)
    scores = dict(valid=dict(nll=nll, without_ends=nll, per_step=4 * nll))
    curve = [[1500, nll, None]]
    records.append(make_record("music", row, seed, scores, dict(valid=pieces), curve, task="music"))
  return records


def write_runs(folder: pathlib.Path, *sweeps) -> pathlib.Path:
  """Writes a results folder with a file for each list of records."""
  (folder / "runs").mkdir(parents=True, exist_ok=True)
  for records in sweeps:
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "runs" / f"{records[0]['sweep']}.jsonl").write_text(text, encoding="utf-8")
  return folder


def tables_of(folder: pathlib.Path, *sweeps) -> dict[str, dict[str, dict[str, str]]]:
  """Writes the report of these records; returns its cells by table's first head, row and column."""
  (page,) = report.write_all(write_runs(folder, *sweeps))
  found, head = {}, None
  for line in page.read_text("utf-8").splitlines():
    cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else None
    if cells and head is None:
      found[cells[0]] = {}
    elif cells and cells[0] != "---":
      found[head[0]][cells[0]] = dict(zip(head[1:], cells[1:], strict=True))
    head = cells and (head or cells)
  return found


def of_row(records, row: str, value) -> list[float]:
  return [value(record) for record in records if record["row"] == row]


def interval(values, digits: int = 2) -> str:
  half_width = STUDENT[len(values)] * np.std(values, ddof=1) / np.sqrt(len(values))
  return f"{np.mean(values):.{digits}f} ± {half_width:.{digits}f}"


class TestTranslation:
  def test_numbers_are_those_of_the_seeds(self, tmp_path):
    records = make_translations("table1")
    records[0]["curve"] = [[1500, None, None]]
    tables = tables_of(tmp_path, records)
    score = lambda record: record["scores"]["test"]["sacrebleu"]
    for row, cells in tables["table1"].items():
      assert cells["seeds"] == "0, 1, 2"
      lost = " (1 not finite)" if row == "relative" else ""
      assert cells["valid loss"] == f"{2.5 - ROWS[row]:.3f} ± 0.000{lost}"
      assert cells["sacreBLEU"] == interval(of_row(records, row, score))
      assert cells["paper's BLEU"] == interval(np.add(of_row(records, row, score), 0.1))
    assert [of["paper, EN-DE base"] for of in tables["table1"].values()] == ["26.8", "26.5", "-"]
    above = np.mean(of_row(records, "relative", score)) - np.mean(of_row(records, "none", score))
    pairs = tables["sacreBLEU of test, row - column"]
    assert re.fullmatch(rf"\*\*\+{above:.2f} ± .*\*\*, p 0.001", pairs["relative"]["none"])
    assert pairs["none"]["relative"].startswith(f"**-{above:.2f} ± ")

  def test_scores_by_length_are_the_bleu_of_their_sentences(self, tmp_path):
    records = make_translations("lengths", num_seeds=2, **{"batches.max_length": 16})
    tables = tables_of(tmp_path, records)

    def of_lengths(row, first, last):
      of = [np.array(record["sentences"]["test"]) for record in records if record["row"] == row]
      return interval([bleu(x[(first <= x[:, 0]) & (x[:, 0] <= last)]) for x in of])

    for row, cells in tables["lengths: tokens (sentences)"].items():
      sides = {name.partition(" (")[0]: cell for name, cell in cells.items()}
      assert sides["up to 15"] == of_lengths(row, 0, 15)
      assert sides["above 15"] == of_lengths(row, 16, 99)

  def test_hand_written_text_stays_and_pictures_are_drawn(self, tmp_path):
    sweeps = [
      make_translations("table2", {"k=0": 0.6}, num_seeds=1),
      make_translations("table3", {"neither": 0.6}, num_seeds=1),
    ]
    page = tmp_path / "report.md"
    page.write_text("Ours.\n<!-- begin table3 -->\nold\n<!-- end table3 -->\nA conclusion.\n")
    tables_of(tmp_path, *sweeps)
    text = page.read_text("utf-8")
    assert text.startswith("Ours.\n<!-- begin table3 -->\n| table3 |") and "old" not in text
    assert "<!-- end table3 -->\nA conclusion.\n" in text
    names = re.findall(r"\]\((.*?)\)", text)
    assert len(names) == 2 and all((tmp_path / x).stat().st_size > 10_000 for x in names)


class TestGraphs:
  def test_numbers_are_those_of_the_seeds(self, tmp_path):
    records = make_chains()
    tables = tables_of(tmp_path, records)
    longest = lambda r: 100 * np.mean([ok for k, ok in r["sentences"]["valid"] if k == 4])
    longer = lambda r: (
      100 * np.mean([ok for k in range(5, 11) for _, ok in r["sentences"][f"test_{k}"]])
    )
    for row in CHAINS:
      cells = tables["graph-clutrr"][row]
      assert cells["valid, 4"] == interval(of_row(records, row, longest), 1)
      assert cells["test, 5 to 10"] == interval(of_row(records, row, longer), 1)
      six = of_row(records, row, lambda r: r["scores"]["test_6"]["accuracy"])
      assert tables["test, relations (graphs)"][row]["6 (26; 105)"] == interval(six, 1)
    assert tables["test, relations (graphs)"]["CTP, published"]["6 (26; 105)"] == f"{CTP[6]:.1f}"
    guess = tables["graph-clutrr"]["most frequent class in training"]
    assert (guess["valid"], guess["valid, 4"]) == ("7.0", "-")
    gains = np.subtract(*(of_row(records, row, longest) for row in ("keys", "none")))
    assert tables["valid, 4, row - column"]["keys"]["none"] == f"+{interval(gains)}"


class TestMusic:
  def test_numbers_are_those_of_the_seeds_that_did_not_diverge(self, tmp_path):
    records = make_music()
    records[1]["scores"]["valid"]["nll"] = records[1]["sentences"]["valid"][0][1] = float("nan")
    tables = tables_of(tmp_path, records)
    nll = lambda record: record["scores"]["valid"]["nll"]
    of = {row: [x for x in of_row(records, row, nll) if np.isfinite(x)] for row in ROWS}
    cells = {row: of["valid, a token"] for row, of in tables["music"].items()}
    assert cells["relative"] == interval(of["relative"], 3)
    assert cells["sinusoidal"] == f"{interval(of['sinusoidal'], 3)} (1 not finite)"
    pairs = tables["valid, a token, row - column"]["relative"]
    above = np.mean(of["relative"]) - np.mean(of["sinusoidal"])
    assert pairs["sinusoidal"].removeprefix("**").startswith(f"{above:+.3f} ± ")
    published = [row["published (second hand), valid, a token"] for row in tables["music"].values()]
    assert published == ["0.357", "0.398", "-"]


@pytest.mark.parametrize(
  "change, words",
  [
    (lambda r: r["config"].update({"model.width": 64}), "its digest is"),
    (lambda r: r.update(seed=7), "its seed is 7"),
    (lambda r: r.update(row="relative"), "a second record of 'relative', seed 1"),
    (lambda r: r["scores"]["test"].update(sacrebleu=12.25), "not 12.25"),
    (lambda r: r["sentences"].pop("test"), "different splits"),
    (lambda r: r.update(config=[]), "no record"),
    (lambda r: _shift(r), "not the same data as line 1"),
    (lambda r: r["budget"].update(updates=3000), "not the same budget as line 1"),
    (lambda r: r["scores"]["test"].update(signatures={}), "not the same signatures as line 1"),
    (lambda r: _with_config(r, {"model.width": 64}), "not the same config as line 2"),
  ],
)
def test_a_wrong_record_is_one_line(call, table1, tmp_path, change, words):
  records = copy.deepcopy([*table1])
  change(records[4])
  folder = write_runs(tmp_path, records)
  refused(call("report", f"--results={folder}"), "table1.jsonl, line 5: ", words)
  assert not (folder / "report.md").exists()


def refused(answer, *words):
  assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1), answer.err
  assert all(word in answer.err for word in words), answer.err


def _shift(record):
  """Changes the lengths of the test sentences, and so the data, but no score."""
  for sentence in record["sentences"]["test"]:
    sentence[0] += 1


def _with_config(record, values):
  record["config"] |= values
  record["digest"] = digest(record["config"])


def test_a_folder_without_records_is_one_line(call, tmp_path):
  refused(call("report", f"--results={tmp_path}"), f"no records in {tmp_path}")


def test_the_committed_pages_match_the_committed_records(tmp_path):
  names = ("runs", "report.md", "graphs.md", "music.md", "positions.md")
  for name in names:
    (shutil.copytree if "." not in name else shutil.copy)(RESULTS / name, tmp_path / name)
  report.write_all(tmp_path)
  for name in names[1:]:
    assert (tmp_path / name).read_text("utf-8") == (RESULTS / name).read_text("utf-8")
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", (RESULTS / name).read_text("utf-8"))
    assert all((RESULTS / picture).exists() for picture in pictures)


@pytest.mark.parametrize("name, own", [
  ("report", {"0.05", "1.0", "0.5"}),  # p, and the paper's keys over values
  ("graphs", {"3.1"}),
  ("music", {"0.05", "0.417", "0.37", "0.109", "0.123"}),  # published, and differences to these
])  # fmt: skip
def test_figures_in_the_text_of_a_page_occur_in_its_tables(name, own):
  text = (RESULTS / f"{name}.md").read_text("utf-8").partition("## Memory")[0]
  blocks = re.compile(r"<!-- begin (.*?) -->.*?<!-- end \1 -->", re.DOTALL)
  figures = re.findall(r"(?<![\w.:/])\d+\.\d+(?: ± \d+\.\d+)?(?!\d)", blocks.sub("", text))
  tables = "".join(match[0] for match in blocks.finditer(text))
  assert [figure for figure in figures if figure not in tables and figure not in own] == []


def test_the_intervals_of_the_readme_are_those_of_the_results():
  text = (RESULTS.parent / "README.md").read_text("utf-8").partition("## Results")[2]
  figures = re.findall(r"\d+\.\d+ ± \d+\.\d+", text)
  tables = "".join(page.read_text("utf-8") for page in RESULTS.glob("*.md"))
  assert len(figures) > 10 and [x for x in figures if x not in tables] == []
