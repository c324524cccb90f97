"""Benchmarks keep every time; contestants that cannot run are rows with the reason."""

import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from experiments.benchmark import attention, models, timing
from experiments.benchmark.attention import AGAIN, STOCK, Case, Contestant
from experiments.benchmark.schemes import SCHEMES
from experiments.benchmark.timing import Program
from relpos_jax import dot_product_attention
from relpos_jax.attention.choice import Implementation

RESULTS = pathlib.Path(__file__).parents[2] / "results"
TINY = ("--heads=2", "--width=4", "--max_distance=2", "--tokens=32", "--repetitions=3")
CASE = Case(2, 8, 2, 4, 2, "float32", is_causal=True, backward=True)
NOT_HERE = "its device is not here"
ELSEWHERE = Implementation(lambda inputs: inputs.query, lambda inputs: NOT_HERE)


def test_pairs_run_side_by_side_and_take_turns_to_be_first(monkeypatch):
  calls = []

  def run_time(function):
    """Takes n seconds for the n-th run."""
    calls.append(function())
    return float(len(calls))

  monkeypatch.setattr(timing, "run_time", run_time)
  functions = {name: lambda name=name: name for name in "abc"}
  first, second = attention.time_pairs(functions, [("a", "c"), ("b", "c")], 2)
  assert "".join(calls) == "cacb" + "acbc"
  assert (first["seconds"], first["against_seconds"]) == ([2.0, 5.0], [1.0, 6.0])
  assert (second["seconds"], second["against_seconds"]) == ([4.0, 7.0], [3.0, 8.0])


def test_without_room_for_jax_nn_the_others_are_compared():
  names = ["chunked", "chunked (no relations)", AGAIN]
  assert attention.choose_pairs(names) == [("chunked", "chunked (no relations)")]


def test_memory_is_shown_without_a_ratio_if_jax_nn_had_no_room():
  rows = {STOCK: dict(temporary_bytes=None), "skew": dict(temporary_bytes=2**21)}
  assert attention._format_memory(dict(contestants=rows)) == {"skew": "2.0 MiB"}


# Attention
# --------------------------------------------------------------------------------------


def test_every_time_and_every_refusal_is_kept(call, tmp_path, monkeypatch):
  monkeypatch.setattr(attention, "BLOCKWISE", ("projected",))
  monkeypatch.setitem(attention.IMPLEMENTATIONS, "elsewhere", ELSEWHERE)
  implementations = "--implementations=projected,per_position,elsewhere"
  cases = "--lengths=8,16", "--masks=bidirectional", "--passes=backward"
  contestants = implementations, "--schemes=t5", "--peers=dense_bias,cudnn"
  flags = *TINY, *contestants, *cases

  out = f"--out={tmp_path}", "--name=here"
  answer = call("benchmark.__main__", "attention", *flags, *out)

  assert answer.status == 0, answer.err
  assert (tmp_path / "attention" / "here.png").stat().st_size > 10_000
  results = json.loads((tmp_path / "attention" / "here.json").read_text())
  assert len(results["cases"]) == 2
  bare = "projected (no relations)"
  pairs = [(name, STOCK) for name in (AGAIN, "projected", bare, "per_position")]
  pairs += [
    ("t5", STOCK),
    ("dense_bias", STOCK),
    ("projected", bare),
    ("projected", "per_position"),
  ]
  for case in results["cases"]:
    assert [(pair["name"], pair["against"]) for pair in case["pairs"]] == pairs
    assert all(len(pair["seconds"]) == 3 for pair in case["pairs"])
    refused = {name: row["refused"] for name, row in case["contestants"].items()}
    refused = {name: reason for name, reason in refused.items() if reason}
    assert refused == {"elsewhere": NOT_HERE, "cudnn": "it needs a GPU"}

  before = (tmp_path / "attention" / "here.json").read_bytes()
  other = call("benchmark.__main__", "attention", *TINY, "--lengths=8", *out)
  other.assert_refused("here.json measurements with other flags --name")
  assert (tmp_path / "attention" / "here.json").read_bytes() == before


def test_every_scheme_runs_with_all_gradients():
  for scheme in SCHEMES:
    program = attention.choose_contestants("none", scheme, "none")[scheme]
    output, gradients = program.prepare(CASE).run()
    assert output.shape == (2, 8, 2, 4), scheme
    assert all(np.any(x) for x in jax.tree.leaves(gradients)), scheme


def test_claims_are_judged_by_the_results_of_a_device(call):
  answer = call("benchmark.__main__", "claims", f"--out={RESULTS}", "--device=nvidia")
  assert answer.status == 0, answer.err
  kind = "forward and backward, causal, bfloat16, T = 4,096"
  row = f"| time of pallas_gpu / cudnn, {kind} | at most 1.30 | 1.83 | **no** |"
  assert row in answer.out.splitlines()


def test_help_names_all_contestants(call):
  answer = call("benchmark.__main__", "attention", "--help")
  contestants = *attention.IMPLEMENTATIONS, *SCHEMES, *attention.PEERS
  assert all(name in answer.out for name in contestants)


CONFIGS = RESULTS.parent / "configs"
OTHER_TASK = "--config is of give one of translation or music"


@pytest.mark.parametrize(
  "arguments, words",
  [
    (["attention", "--lengths=48"], "--lengths 48 --tokens=4096"),
    (["attention", "--implementations=fast"], "'fast' chunked"),
    (["attention", "--schemes=fast"], "'fast' deberta"),
    (["attention", "--dtype=float8"], "'float8' bfloat16"),
    (["claims"], "{out} first_device.sh"),
    (["step", f"--config={CONFIGS}/graph.py"], OTHER_TASK),
    (["step", f"--config={CONFIGS}/length_tasks.py:reverse_string,xl"], OTHER_TASK),
  ],
)
def test_a_mistake_is_one_line_before_anything_is_compiled(
  call, tmp_path, arguments, words
):
  answer = call("benchmark.__main__", *arguments, f"--out={tmp_path}")
  answer.assert_refused(words.format(out=tmp_path))


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
  entrant = Contestant("none", lambda case: Program(run, 7, needed))
  rows, functions = attention.prepare(CASE, {"large": entrant})
  assert rows["large"]["refused"].startswith(words)
  assert not functions


def test_a_dense_bias_holds_the_relative_key_term():
  case = CASE._replace(backward=False)
  query, key, value, relations = attention.arguments(case)
  relations = relations.__class__(relations.key, None)
  program = attention.PEERS["dense_bias"].prepare(case)
  options = dict(relations=relations, is_causal=True, implementation="reference")
  wanted = dot_product_attention(query, key, value, **options)
  np.testing.assert_allclose(program.run(), wanted, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_pytorch_gives_the_same_gradients(is_causal):
  pytest.importorskip("torch")
  case = CASE._replace(is_causal=is_causal)
  attend = functools.partial(jax.nn.dot_product_attention, is_causal=is_causal)
  cotangent, *arrays, _ = attention.arguments(case)
  _, pull_back = jax.vjp(attend, *arrays)
  found = attention.PEERS["torch_sdpa"].prepare(case).run()
  for theirs, ours in zip(found, pull_back(cotangent), strict=True):
    np.testing.assert_allclose(theirs.swapaxes(1, 2), ours, atol=1e-5)


# A training step
# --------------------------------------------------------------------------------------


def test_a_rounds_ratio_is_to_the_mean_of_its_two_sinusoidal_steps():
  results = json.loads((RESULTS / "steps" / "multi30k-64x16.json").read_text())
  drift = np.array([1.0, 2.0, 3.0, 50.0, 60.0, 70.0])
  factors = {models.BASELINE: 0.9, models.AGAIN: 1.1, "relative": 1.04}
  seconds = {name: (factor * drift).tolist() for name, factor in factors.items()}
  row = models.make_section(results | dict(seconds=seconds)).splitlines()[-1]
  assert row.endswith("| 1.040 (1.040 to 1.040) | 1.040 to 1.040 |")


def test_schemes_of_positions_are_timed_in_turns(call, monkeypatch, tmp_path):
  rows = [(models.BASELINE, {}), ("t5", {"model.tables_per_layer": False})]
  monkeypatch.setattr(models, "sweep", lambda: rows)
  changes = "batches.tokens=32 batches.max_length=16 model.width=16 model.num_layers=1"
  flags = ["--config=configs/positions.py:chorales", f"--out={tmp_path}"]
  flags += [f"--config.{change}" for change in changes.split()]

  times = "--length=16", "--repetitions=2"
  answer = call("benchmark.__main__", "positions", *flags, *times)

  assert answer.status == 0, answer.err
  (file,) = (tmp_path / "positions").glob("*-2x16.json")
  raw = json.loads(file.read_text())
  assert [*raw["seconds"]] == [models.BASELINE, "t5", models.AGAIN]
  same, t5, again = [model["parameters"] for model in raw["models"].values()]
  assert same == again < t5
  assert f"<!-- begin cost-{file.stem} -->" in (tmp_path / "positions.md").read_text()


# Pages
# --------------------------------------------------------------------------------------


def test_the_committed_pages_are_those_of_the_raw_results(call, tmp_path, monkeypatch):
  monkeypatch.setattr(attention, "cost_curves", lambda *_: None)
  pages = "attention", "steps", "positions"
  for name in pages:
    shutil.copytree(RESULTS / name, tmp_path / name)
    shutil.copy(RESULTS / f"{name}.md", tmp_path)
  assert call("benchmark.__main__", "pages", f"--out={tmp_path}").status == 0
  for name in pages:
    ours, wanted = (folder / f"{name}.md" for folder in (tmp_path, RESULTS))
    assert ours.read_text() == wanted.read_text(), name
