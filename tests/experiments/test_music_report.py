"""The report on music: every number is that of the raw records, and none is lost on the way."""

import json

import numpy as np
import pytest
from test_sweep_report import invent_sweep, pictures_in, tables_in, write_runs

from experiments import report
from experiments.reports import music
from relpos_jax.errors import InputError
from relpos_jax.evaluation.record import digest
from relpos_jax.evaluation.statistics import difference_interval, student_interval

ROWS = dict(relative=0.35, clipped=0.42, sinusoidal=0.407, none=0.421)
SPLITS = dict(valid=30, test=25)


def invent(row: str, seed: int, sweep: str = "music", **config):
  """The record of a run that never was."""
  scores, sentences = {}, {}
  for split, number in SPLITS.items():
    lengths = 4 * np.random.default_rng(number).integers(100, 300, number)
    random = np.random.default_rng([seed, number, *map(ord, row)])
    nats = (ROWS[row] + random.normal(0, 0.01, number)) * (lengths + 1)
    steps, end_nats = lengths.sum() / 4, 0.5 * number
    scores[split] = dict(
      nll=nats.sum() / (lengths + 1).sum(),
      without_ends=(nats.sum() - end_nats) / lengths.sum(),
      per_step=nats.sum() / steps,
    )
    sentences[split] = [[int(n), round(x, 3)] for n, x in zip(lengths, nats, strict=True)]
  config = {"task": "music", "seed": seed, "model.width": 96, **config}
  return dict(
    **dict(sweep=sweep, row=row, seed=seed, digest=digest(config), config=config),
    **dict(commit="0123456789abcdef" + 24 * "0", date="2026-11-21T10:00:00+00:00"),
    **dict(hardware="1 x cpu, 4 cores of AMD EPYC", packages=dict(python="3.11.7", jax="0.10.2")),
    budget=dict(updates=6000, tokens_per_update=2304, minutes=31.5, tokens_per_second=None),
    **dict(scores=scores, sentences=sentences),
    curve=[[step, ROWS[row] + 100 / step, None] for step in range(500, 6001, 500)],
  )


@pytest.fixture(scope="module")
def records():
  return [invent(row, seed) for seed in range(3) for row in ROWS]


@pytest.fixture(scope="module")
def page(records, tmp_path_factory):
  """The page of these records, and its folder."""
  folder = write_runs(tmp_path_factory.mktemp("results"), records)
  assert report.write_all(folder) == [folder / "music.md"]
  return (folder / "music.md").read_text("utf-8"), folder


def test_every_number_is_that_of_the_runs(page, records):
  (table,) = tables_in(page[0])
  assert [row[""] for row in table] == [*ROWS]
  for cells in table:
    runs = [record for record in records if record["row"] == cells[""]]
    assert cells["seeds"] == "0, 1, 2"
    for split in SPLITS:
      for measure, words in dict(
        nll="a token", without_ends="without ends", per_step="a step"
      ).items():
        mean, half = student_interval([run["scores"][split][measure] for run in runs])
        assert cells[f"{split}, {words}"] == f"{mean:.3f} ± {half:.3f}"
  assert {row[""]: row["published (second hand), valid"] for row in table} == dict(
    relative="0.357", sinusoidal="0.398", clipped="-", none="-"
  )


def test_differences_are_from_the_best_row(page, records):
  (table,) = tables_in(page[0])
  nll = lambda row: [r["scores"]["valid"]["nll"] for r in records if r["row"] == row]
  for cells in table:
    told = cells["above relative, valid, a token"]
    if cells[""] == "relative":
      assert told == ""
    else:
      mean, half = difference_interval(nll(cells[""]), nll("relative"))
      assert told.startswith(f"{mean:+.3f} ± {half:.3f}, p = 0.0")


def test_the_ordering_is_told_as_far_as_the_spread_shows_it(page):
  text = page[0]
  assert "from the lowest to the highest: relative, sinusoidal, clipped, none." in text
  assert "sinusoidal above relative: +0.0" in text
  assert "none above clipped" not in text and "Inside it: 1 of 6." in text
  assert "relative below sinusoidal, holds here; " in text
  assert "Relative reaches the 0.357 quoted." in text
  assert "Sinusoidal is 0.00" in text and "above the 0.398 quoted." in text


def test_figures_that_nobody_checked_are_called_so(page):
  """Nor is all that lies between two of them put down to positions."""
  text = page[0]
  assert "quoted second hand, not checked: " in text and "with instrument labels 0.37" in text
  assert "The ordering quoted second hand, relative below sinusoidal," in text
  assert "not all need be of the positions" in text


def test_how_settings_were_chosen_is_not_told_of_runs_that_nobody_knows(page):
  assert "chosen" not in page[0]


def test_runs_and_memory_share_a_page_whoever_writes_it(page, request):
  text, folder = page
  raw = request.config.rootpath / "results" / "music" / "memory.json"
  (folder / "music" / "memory.json").write_bytes(raw.read_bytes())
  whole = music.write(folder).read_text("utf-8")
  assert text.rstrip() in whole and "## Memory of one layer's attention" in whole
  assert report.write_all(folder) == [folder / "music.md"]
  assert (folder / "music.md").read_text("utf-8") == whole
  (folder / "music" / "memory.json").unlink()
  music.write(folder)
  assert all(
    (folder / name).stat().st_size > 5_000 for name in pictures_in(text) if "://" not in name
  )


def test_other_tasks_keep_their_pages_and_music_of_ones_own_has_no_published_figures(
  monkeypatch, tmp_path
):
  from experiments.reports import music_runs, tables

  for module in (music_runs, tables):
    monkeypatch.setattr(module, "spread_curves", lambda panels, path: path)
  mine = [invent(row, 0, "mine", **{"data.source": "midi"}) for row in ("relative", "none")]
  folder = write_runs(tmp_path, mine, invent_sweep("table1", dict(relative=0.8), num_seeds=1))
  assert report.write_all(folder) == [folder / "report.md", folder / "music.md"]
  text = (folder / "music.md").read_text("utf-8")
  assert "mine" not in (folder / "report.md").read_text("utf-8")
  assert "table1" not in text and "### mine" in text
  assert "published" not in text and "no difference" in text and "One seed of all rows" in text


def make_infinite(record):
  """Of a run that diverged, one piece is without likelihood, and so is the whole."""
  record["sentences"]["test"][0][1] = float("nan")
  record["scores"]["test"]["nll"] = float("nan")


@pytest.mark.parametrize(
  "change, told",
  [
    (lambda r: r.update(commit="fedcba9876543210"), "commit fedcba987654, not 0123456789ab"),
    (make_infinite, "no finite likelihood"),
    (lambda r: r["sentences"]["test"].reverse(), "pieces 25 of test ("),
  ],
)
def test_a_run_that_is_unlike_the_others_is_set_apart(records, monkeypatch, tmp_path, change, told):
  from experiments.reports import music_runs

  monkeypatch.setattr(music_runs, "spread_curves", lambda panels, path: path)
  change(other := invent("none", 3))
  folder = write_runs(tmp_path, [*records, other])
  text = music.write(folder).read_text("utf-8")
  (table,) = tables_in(text)
  assert {row["seeds"] for row in table} == {"0, 1, 2"}
  assert f"- none, seed 3: {told}" in text and "nan" not in text


def test_however_many_diverge_they_are_the_ones_set_apart(monkeypatch, tmp_path):
  from experiments.reports import music_runs

  monkeypatch.setattr(music_runs, "spread_curves", lambda panels, path: path)
  lost = [invent(row, 0) | dict(date="2027-01-01") for row in ("relative", "sinusoidal")]
  for record in lost:
    make_infinite(record)
  text = music.write(write_runs(tmp_path, [*lost, invent("none", 0)])).read_text("utf-8")
  assert [row[""] for row in tables_in(text)[0]] == ["none"]
  for row in ("relative", "sinusoidal"):
    assert f"- {row}, seed 0: no finite likelihood\n" in text
  assert "reaches" not in text and "nan" not in text


def test_where_all_diverge_there_is_a_line_and_no_table(tmp_path):
  make_infinite(record := invent("relative", 0))
  text = music.write(write_runs(tmp_path, [record])).read_text("utf-8")
  assert "### music\n\nNo run has a finite likelihood.\n" in text and not tables_in(text)
  assert "- relative, seed 0: no finite likelihood\n" in text and "learning.png" not in text


@pytest.mark.parametrize("name", ["memory", "step"])
@pytest.mark.parametrize(
  "damaged",
  [
    "{}",
    '{"rows": [], "settings": {}}',
    '{"settings": [1], "rows": [{}]}',
    '{"settings": {"heads": 1}}',
  ],
)
def test_a_damaged_measurement_is_one_line(tmp_path, name, damaged):
  file = tmp_path / "music" / f"{name}.json"
  file.parent.mkdir()
  file.write_text(damaged)
  with pytest.raises(InputError, match=rf"^{file} .*experiments\.memory") as caught:
    music.write(tmp_path)
  assert "\n" not in str(caught.value) and not (tmp_path / "music.md").exists()


@pytest.mark.parametrize(
  "keys", [("environment",), ("rows", 0, "counts"), ("rows", 0, "programs", 0)]
)
def test_a_part_that_is_missing_from_a_measurement_is_one_line(request, tmp_path, keys):
  results = json.loads((request.config.rootpath / "results/music/memory.json").read_text("utf-8"))
  results["rows"] = [row for row in results["rows"] if row["length"] == 2048]
  part = results
  for key in keys[:-1]:
    part = part[key]
  del part[keys[-1]]
  (tmp_path / "music").mkdir()
  (tmp_path / "music" / "memory.json").write_text(json.dumps(results))
  with pytest.raises(InputError, match=r"memory\.json .*experiments\.memory"):
    music.write(tmp_path)


@pytest.mark.parametrize(
  "damage, words",
  [
    (lambda r: r["scores"]["valid"].update(nll=0.3), "give 0.35 nats not 0.3000"),
    (lambda r: r["scores"]["valid"].update(nll=float("nan")), "give 0.35 nats not nan"),
    (lambda r: r["scores"]["test"].pop("per_step"), "no number 'per_step' test"),
    (lambda r: r["sentences"]["test"][0].append(1), "test"),
    (lambda r: r["sentences"].pop("test"), "different splits"),
  ],
)
def test_a_damaged_record_is_one_line(tmp_path, damage, words):
  record = json.loads(json.dumps(invent("relative", 0)))
  damage(record)
  with pytest.raises(InputError) as caught:
    music.write(write_runs(tmp_path, [record]))
  assert all(word in str(caught.value) for word in ["music.jsonl, line 1", *words.split()])
  assert "\n" not in str(caught.value)
