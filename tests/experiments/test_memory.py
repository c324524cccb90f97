"""The command memory: what it counts, what it refuses, and a report of what is there."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import memory
from experiments.reports import music
from relpos_jax.data.batching import Tokens
from relpos_jax.evaluation.cost import Program

TINY = ("--heads=2", "--width=4", "--layers=1")


@pytest.fixture
def fake_compiler(monkeypatch):
  """Traces, and says that all takes as many bytes as its arguments; nothing is compiled."""

  def compile_program(function, *arguments):
    jax.eval_shape(function, *arguments)
    number = sum(4 * leaf.size for leaf in jax.tree.leaves(arguments))
    return Program(None, number, number)

  monkeypatch.setattr(memory, "compile_program", compile_program)


def test_the_papers_count_is_of_vectors_of_pairs_and_of_distances():
  """At the paper's size: 8.5 and 4.2 of its units."""
  counts = memory._counts(2048, heads=8, width=64)
  assert counts == dict(
    gathered=4 * 2048**2 * 512, table=4 * (2 * 1024 + 1) * 512, logits=4 * 8 * 2048**2
  )
  assert int(counts["gathered"] / 1e8) == 85 and int(counts["table"] / 1e5) == 41


def test_the_gathered_form_holds_what_is_counted_and_the_skewed_one_does_not():
  gathered = memory._counts(128, heads=2, width=16)["gathered"]
  held = {
    name: memory._temporary_bytes(name, 128, 2, 16, True, False)
    for name in ("per_position", "skew")
  }
  assert held["skew"] < gathered / 2 < gathered <= held["per_position"]


@pytest.mark.usefixtures("fake_compiler")
def test_every_form_is_compiled_with_and_without_relations_and_gradients(call, tmp_path):
  answer = call("memory", *TINY, "--lengths=6", f"--out={tmp_path}")
  assert answer.status == 0, answer.err
  results = json.loads((tmp_path / "music" / "memory.json").read_text())
  assert [row["length"] for row in results["rows"]] == [6]
  for row in results["rows"]:
    tokens, table = 4 * row["length"] * 8, 4 * (row["length"] + 1) * 8
    sizes = {
      (p["implementation"], p["relations"], p["backward"]): p["temporary_bytes"]
      for p in row["programs"]
    }
    assert sizes == {
      (name, relations, backward): (3 + backward) * tokens + relations * table
      for name in ("per_position", "skew", "chunked")
      for relations in (True, False)
      for backward in (True, False)
    }
  assert (tmp_path / "music" / "memory.png").exists()
  again = call("memory", "--lengths=", f"--out={tmp_path}")
  assert again.status == 0, again.err


@pytest.mark.usefixtures("fake_compiler")
def test_measuring_that_stops_leaves_the_older_results(call, tmp_path, monkeypatch):
  file = tmp_path / "music" / "memory.json"
  call("memory", *TINY, "--lengths=6,8", f"--out={tmp_path}")
  older, temporary_bytes = file.read_text(), memory._temporary_bytes

  def stop_at_eight(name, length, *rest):
    if length == 8:
      raise KeyboardInterrupt
    return temporary_bytes(name, length, *rest)

  monkeypatch.setattr(memory, "_temporary_bytes", stop_at_eight)
  with pytest.raises(KeyboardInterrupt):
    memory.main("4,8", "", heads=2, width=4, layers=1, out=str(tmp_path))
  assert file.read_text() == older


def row(length: int, megabytes: float) -> dict:
  """Relations add a half, gradients double; each form holds a tenth of the one before."""
  shares = dict(per_position=1.0, skew=0.1, chunked=0.01)
  programs = [
    dict(
      implementation=name,
      relations=relations,
      backward=backward,
      temporary_bytes=round(1e6 * megabytes * share * (1 + relations / 2) * (1 + backward)),
    )
    for name, share in shares.items()
    for relations in (True, False)
    for backward in (True, False)
  ]
  return dict(length=length, counts=memory._counts(length, 8, 64), programs=programs)


def cells(report: str, title: str) -> dict[str, list[str]]:
  """The rows of the table below a title, by their first cell."""
  lines = report.split(f"### {title}")[1].split("###")[0].splitlines()
  rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
  return {row[0]: row[1:] for row in rows}


def test_the_report_says_what_the_raw_results_say(tmp_path):
  (tmp_path / "music").mkdir()
  results = dict(
    settings=dict(heads=8, width=64),
    rows=[row(512, 50), row(2048, 10), row(4096, 90), row(8192, 1000)],
  )
  memory._write(tmp_path / "music" / "memory.json", **results)
  music.write(tmp_path)
  report = (tmp_path / "music.md").read_text()
  paper = cells(report, "Beside the paper")
  assert paper["gathered (Shaw et al. 2018)"] == ["8.5 GB", "8.59 GB", "5.0 MB", "15.0 MB"]
  assert paper["skewed (Huang et al. 2018)"] == ["4.2 MB", "4.2 MB", "0.5 MB", "1.5 MB"]
  forward = cells(report, "Forward\n")
  assert forward[""][-1] == "doubling L, from 2,048 on"
  assert forward["by blocks"] == ["0.8 MB", "0.1 MB", "1.4 MB", "15.0 MB", "x 10.00"]
  both = cells(report, "Forward and backward")
  assert both["gathered (no relations)"] == ["100 MB", "20.0 MB", "180 MB", "2 GB", "x 10.00"]
  added = cells(report, "What relations add to the peak, forward and backward")
  assert added["gathered (Shaw et al. 2018)"] == ["50.0 MB", "10.0 MB", "90.0 MB", "1 GB"]


@pytest.mark.usefixtures("fake_compiler")
def test_one_step_runs_at_the_longest_length_that_fits(call, tmp_path, monkeypatch):
  tried = dict(bytes_needed=[9_000_000, 6_000_000, 4_000_000], lengths=[])

  def compile_program(function, state, batch):
    tried["lengths"].append(batch.tokens.shape[1])
    needed = tried["bytes_needed"][len(tried["lengths"]) - 1]
    return Program(lambda state, batch: (state, dict(loss=jnp.float32(4.25))), 0, needed)

  monkeypatch.setattr(memory, "compile_program", compile_program)
  monkeypatch.setattr(memory, "free_bytes", lambda: 6_500_000)
  answer = call("memory", *TINY, "--lengths=", "--step_lengths=8,32,16", f"--out={tmp_path}")
  assert answer.status == 0, answer.err
  step = json.loads((tmp_path / "music" / "step.json").read_text())
  assert tried["lengths"] == [32, 16]
  assert (step["length"], step["bytes_needed"], step["loss"]) == (16, 6_000_000, 4.25)
  too_long = dict(length=32, bytes_needed=9_000_000, free_bytes=6_500_000)
  assert step["too_long"] == [too_long]
  report = (tmp_path / "music.md").read_text()
  assert "| 32 | 9.0 MB | not run: 6.5 MB are free |" in report
  assert "| 16 | 6.0 MB | " in report and " s, at most" in report and "loss 4.25 |" in report
  step["settings"] |= dict(layers=3, dropout=0.25, dtype="bfloat16")
  (tmp_path / "music" / "step.json").write_text(json.dumps(step))
  report = music.write(tmp_path).read_text()
  assert "3 layers, D = 8, 2 heads" in report and "dropout 0.25, bfloat16, Adam" in report


def test_a_step_learns():
  """The same tokens again are less of a surprise."""
  _, step, shapes = memory.make_step(memory.step_config(16, heads=2, width=4, layers=1))
  random = np.random.default_rng(0)
  fill = lambda leaf: jnp.asarray(0.5 * random.standard_normal(leaf.shape), leaf.dtype)
  zeros = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype)
  state = jax.tree.map(zeros, shapes)._replace(params=jax.tree.map(fill, shapes.params))
  batch = Tokens(jnp.asarray(random.integers(3, 132, (1, 16)), jnp.int32))
  losses = []
  for _ in range(300):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
  assert 0 < np.mean(losses[-50:]) < np.mean(losses[:50]) - 0.02


@pytest.mark.parametrize(
  "flags, line",
  [
    (["--lengths=", "--out={out}"], "no results in {out}/music: measure first"),
    (["--lengths=12,no"], "--lengths: 'no' is no length"),
    (["--lengths=9999999999999"], "--lengths: '9999999999999' is no length"),
    (["--heads=0"], "--heads is 0; want at least 1"),
    (
      ["--lengths=", "--step_lengths=16", "--heads=1", "--width=3", "--out={out}"],
      "--heads=1 times --width=3 is odd",
    ),
    (["--lengths=", "--out={out}/file"], "cannot use {out}/file/music (Not a directory)"),
  ],
)
def test_bad_input_is_one_line(call, tmp_path, flags, line):
  (tmp_path / "file").touch()
  answer = call("memory", *(flag.format(out=tmp_path) for flag in flags))
  assert answer.status == 2 and answer.num_compilations == 0
  assert (
    answer.err.startswith(f"error: {line.format(out=tmp_path)}") and answer.err.count("\n") == 1
  )


@pytest.mark.usefixtures("fake_compiler")
def test_a_step_that_fits_nowhere_is_one_line(call, tmp_path, monkeypatch):
  monkeypatch.setattr(memory, "free_bytes", lambda: 1)
  answer = call("memory", *TINY, "--lengths=", "--step_lengths=16", f"--out={tmp_path}")
  assert answer.status == 2
  assert "--step_lengths: none fits, the shortest needs" in answer.err


def test_the_report_at_hand_is_that_of_the_results_at_hand(tmp_path):
  results = pathlib.Path(__file__).parents[2] / "results"
  shutil.copytree(results / "music", tmp_path / "music")
  shutil.copytree(results / "runs", tmp_path / "runs")
  music.write(tmp_path)
  assert (tmp_path / "music.md").read_text() == (results / "music.md").read_text()
