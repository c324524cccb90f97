"""The benchmarks: every time is kept, contestants that cannot run are rows with the reason."""

import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from experiments.benchmark import attention, models, timing
from experiments.benchmark.attention import AGAIN, STOCK, Case, Contestant
from experiments.benchmark.timing import Program
from relpos_jax.attention.choice import Implementation

RESULTS = pathlib.Path(__file__).parents[2] / "results"
TINY = ("--heads=2", "--width=4", "--max_distance=2", "--tokens=32", "--repetitions=3")
CASE = Case(2, 8, 2, 4, 2, "float32", is_causal=True, backward=True)
REFERENCE = functools.partial(attention._ours, implementation="reference")
ELSEWHERE = Implementation(
  lambda inputs: inputs.query, lambda inputs: "its device is not here"
)


# Times
# -------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
  """Returns the names that ran; the n-th run takes n seconds."""
  calls = []

  def run_time(function):
    calls.append(function())
    return float(len(calls))

  monkeypatch.setattr(timing, "run_time", run_time)
  return calls


FUNCTIONS = {name: lambda name=name: name for name in "abc"}


def test_pairs_run_side_by_side_and_take_turns_to_be_first(calls):
  first, second = attention.time_pairs(FUNCTIONS, [("a", "c"), ("b", "c")], 2)
  assert "".join(calls) == "cacb" + "acbc"
  assert first == dict(
    name="a", against="c", seconds=[2.0, 5.0], against_seconds=[1.0, 6.0]
  )
  assert second == dict(
    name="b", against="c", seconds=[4.0, 7.0], against_seconds=[3.0, 8.0]
  )


def test_in_rounds_each_is_as_often_first_and_as_often_before_its_neighbour(calls):
  seconds = timing.time_rounds(FUNCTIONS, 6)
  rounds = ["".join(calls[i : i + 3]) for i in range(0, 18, 3)]
  assert rounds == ["abc", "cba", "bca", "acb", "cab", "bac"]
  assert seconds["a"][:2] == [1.0, 6.0] and all(len(of) == 6 for of in seconds.values())


# Attention
# ---------------------------------------------------------------------------------------


def test_every_time_and_every_refusal_is_kept(call, tmp_path, monkeypatch):
  monkeypatch.setattr(attention, "BLOCKWISE", ("projected",))
  monkeypatch.setitem(attention.IMPLEMENTATIONS, "elsewhere", ELSEWHERE)
  answer = call(
    *("benchmark.__main__", "attention", *TINY, "--lengths=8,16"),
    *("--implementations=projected,per_position,elsewhere", "--peers=dense_bias,cudnn"),
    *("--masks=bidirectional", "--passes=backward", f"--out={tmp_path}", "--name=here"),
  )
  assert answer.status == 0, answer.err
  assert (tmp_path / "attention" / "here.png").stat().st_size > 10_000
  results = json.loads((tmp_path / "attention" / "here.json").read_text())
  bare = "projected (no relations)"
  others = [AGAIN, "projected", bare, "per_position", "dense_bias"]
  pairs = [
    *((name, STOCK) for name in others),
    ("projected", bare),
    ("projected", "per_position"),
  ]
  for case in results["cases"]:
    assert [(pair["name"], pair["against"]) for pair in case["pairs"]] == pairs
    for pair in case["pairs"]:
      assert len(pair["seconds"]) == len(pair["against_seconds"]) == 3
      assert min(pair["seconds"] + pair["against_seconds"]) > 0
    refused = {
      name: row["refused"]
      for name, row in case["contestants"].items()
      if row["refused"]
    }
    assert refused == {"elsewhere": "its device is not here", "cudnn": "it needs a GPU"}
    assert case["contestants"][STOCK]["temporary_bytes"] > 0


@pytest.mark.parametrize(
  "flag, words",
  [
    ("lengths=48", "--lengths 48 --tokens=4096"),
    ("implementations=fast", "'fast' chunked"),
    ("repetitions=0", "--repetitions=0 positive integer"),
  ],
)
def test_a_mistake_is_one_line_before_anything_is_compiled(call, tmp_path, flag, words):
  call(
    "benchmark.__main__", "attention", f"--out={tmp_path}", f"--{flag}"
  ).assert_refused(words)


def fail():
  raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nat length")


@pytest.mark.parametrize(
  "run, needed, words",
  [
    (lambda: 0, 2**60, "it needs 1073741824.0 GiB of"),
    (fail, 0, "RESOURCE_EXHAUSTED: Out of"),
  ],
)
def test_a_contestant_without_room_is_a_row_with_the_reason(run, needed, words):
  entrants = dict(large=Contestant("none", lambda case: Program(run, 7, needed)))
  rows, functions = attention.prepare(CASE, entrants)
  assert (
    rows["large"]["refused"].startswith(words) and rows["large"]["temporary_bytes"] == 7
  )
  assert not functions


def keys_only(case):
  *arrays, relations = attention.arguments(case)
  return *arrays, relations.__class__(relations.key, None)


def test_a_dense_bias_holds_the_relative_key_term():
  case = CASE._replace(backward=False)
  functions = attention._dense_bias, REFERENCE
  found, wanted = (
    jax.jit(functools.partial(of, case))(*keys_only(case)) for of in functions
  )
  np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_pytorch_gives_the_same_results_and_gradients(is_causal, backward):
  pytest.importorskip("torch")
  case = CASE._replace(is_causal=is_causal, backward=backward)
  *arrays, _ = attention.arguments(case)
  attend = functools.partial(attention._jax_nn, case, relations=None)
  wanted = jax.vjp(attend, *arrays[1:])[1](arrays[0]) if backward else [attend(*arrays)]
  found = attention.PEERS["torch_sdpa"].prepare(case).run()
  for theirs, ours in zip(found if backward else [found], wanted, strict=True):
    np.testing.assert_allclose(theirs.swapaxes(1, 2), ours, atol=1e-5)


# A training step
# ---------------------------------------------------------------------------------


def test_a_training_step_is_compared_with_sinusoids(call, data, monkeypatch, tmp_path):
  ran = []

  def make_stepper(config, changes, shape):
    figures = dict(parameters=1, temporary_bytes=1)
    return lambda: ran.append((changes["model.positions"], *shape)), figures

  monkeypatch.setattr(models, "make_stepper", make_stepper)
  flags = f"--config={data}/tiny.py", "--repetitions=6", f"--out={tmp_path}"
  for length, rows in ((16, 8), (8, 16)):
    answer = call("benchmark.__main__", "step", *flags, f"--length={length}")
    assert answer.status == 0, answer.err
    assert ran.count(("relative", rows, length)) == 6
    assert ran.count(("sinusoidal", rows, length)) == 12
  raw = json.loads((tmp_path / "steps" / "tiny-8x16.json").read_text())
  assert [len(of) for of in raw["seconds"].values()] == 3 * [6] and raw["shape"] == [
    8,
    16,
  ]
  assert (tmp_path / "steps.md").read_text().count("| sinusoidal (again) |") == 2
  mistakes = {
    "length=0": "give 1",
    "config.model.positions=sinusoidal": "give relative",
  }
  for mistake, words in (mistakes | {"repetitions=1": "integer 2"}).items():
    answer = call("benchmark.__main__", "step", *flags, f"--{mistake}")
    answer.assert_refused(f"{mistake.partition('=')[0]} {words}")


def test_a_rounds_ratio_is_to_the_mean_of_its_two_sinusoidal_steps():
  results = json.loads((RESULTS / "steps" / "multi30k-64x16.json").read_text())
  drift = np.array([1.0, 2.0, 3.0, 50.0, 60.0, 70.0])
  factors = {models.BASELINE: 0.9, models.AGAIN: 1.1, "relative": 1.04}
  seconds = {name: (factor * drift).tolist() for name, factor in factors.items()}
  row = models.make_section(results | dict(seconds=seconds)).splitlines()[-1]
  assert row.endswith("| 1.040 (1.040 to 1.040) | 1.040 to 1.040 |")


def test_schemes_of_positions_are_timed_in_turns(call, monkeypatch, tmp_path):
  rows = [
    ("rotary", {}),
    (models.BASELINE, {}),
    ("t5", {"model.tables_per_layer": False}),
  ]
  monkeypatch.setattr(models, "sweep", lambda: rows)
  flags = (
    "--length=16",
    "--repetitions=2",
    f"--out={tmp_path}",
    "--config.batches.tokens=32",
  )
  config = "--config=configs/positions.py:chorales", "--config.batches.max_length=16"
  small = "--config.model.width=16", "--config.model.num_layers=1"
  answer = call("benchmark.__main__", "positions", *config, *small, *flags)
  assert answer.status == 0, answer.err
  (file,) = (tmp_path / "positions").glob("*-2x16.json")
  raw = json.loads(file.read_text())
  assert [*raw["seconds"]] == ["rotary", models.BASELINE, "t5", models.AGAIN]
  rotary, same, t5, again = (of["parameters"] for of in raw["models"].values())
  assert rotary == same == again < t5
  assert min(of["temporary_bytes"] for of in raw["models"].values()) > 0
  assert f"<!-- begin cost-{file.stem} -->" in (tmp_path / "positions.md").read_text()


# Pages
# -------------------------------------------------------------------------------------------


def test_the_committed_pages_are_those_of_the_raw_results(call, tmp_path, monkeypatch):
  monkeypatch.setattr(attention, "cost_curves", lambda *_: None)
  pages = "attention", "steps", "positions"
  for name in pages:
    shutil.copytree(RESULTS / name, tmp_path / name)
    shutil.copy(RESULTS / f"{name}.md", tmp_path)
  assert call("benchmark.__main__", "pages", f"--out={tmp_path}").status == 0
  for name in pages:
    assert (tmp_path / f"{name}.md").read_text() == (
      RESULTS / f"{name}.md"
    ).read_text(), name
