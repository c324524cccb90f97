"""The benchmarks: what they leave, and that who cannot run is a row with the reason."""

import functools
import json
import pathlib
import shutil
import sys
from functools import partial

import jax
import numpy as np
import pytest

from experiments import benchmark, step_benchmark
from experiments.benchmarks import contestants, measurement, tables, torch_peers
from experiments.benchmarks.contestants import AGAIN, STOCK, Case, Contestant, Prepared
from experiments.reports import steps
from relpos_jax.attention.choice import Implementation
from relpos_jax.errors import InputError

TINY = ("--heads=2", "--width=4", "--max_distance=2", "--tokens=32", "--repetitions=3")
CASE = Case(2, 8, 2, 4, 2, "float32", is_causal=True, backward=True)
ELSEWHERE = Implementation(lambda inputs: inputs.query, lambda inputs: "its device is not here")


@pytest.fixture(scope="module")
def out(call, tmp_path_factory) -> pathlib.Path:
  """The folder of a small measurement; one of the implementations is for another device.

  "projected", which is soon compiled, stands for the blockwise ones.
  """
  folder = tmp_path_factory.mktemp("benchmark") / "results"
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(measurement, "BLOCKWISE", ("projected",))
    patch.setitem(benchmark.IMPLEMENTATIONS, "elsewhere", ELSEWHERE)
    answer = call(
      *("benchmark", *TINY, "--seconds=0", "--lengths=8,16", "--memory_lengths=16,64"),
      *("--implementations=projected,per_position,elsewhere", "--peers=dense_bias,cudnn"),
      *("--causal=no", "--passes=backward", f"--out={folder}", "--name=here"),
    )
  assert answer.status == 0, answer.err
  assert "left in all" in answer.err
  return folder


@pytest.fixture
def results(out):
  return json.loads((out / "attention" / "here.json").read_text())


def test_every_single_time_is_kept(results):
  assert [(case["length"], case["batch"], case["backward"]) for case in results["cases"]] == [
    *((8, 4, True), (16, 2, True)),
  ]
  bare = "projected (no relations)"
  beside_stock = [AGAIN, "projected", bare, "per_position", "dense_bias"]
  for case in results["cases"]:
    pairs = {(pair["name"], pair["against"]): pair for pair in case["pairs"]}
    others = [("projected", bare), ("projected", "per_position")]
    assert [*pairs] == [*((name, STOCK) for name in beside_stock), *others]
    for pair in pairs.values():
      assert len(pair["seconds"]) == len(pair["against_seconds"]) == 3
      assert min(pair["seconds"] + pair["against_seconds"]) > 0


def test_who_cannot_run_is_a_row_with_the_reason(results, out):
  for case in [*results["cases"], *results["memory"]]:
    refused = {name: row["refused"] for name, row in case["contestants"].items() if row["refused"]}
    assert refused == {"elsewhere": "its device is not here", "cudnn": "it needs a GPU"}
  assert "- elsewhere: its device is not here\n" in (out / "attention.md").read_text()


def test_memory_is_known_for_all_that_is_compiled(results):
  one, four = (case["contestants"] for case in results["memory"])
  stock = [rows[STOCK]["temporary_bytes"] for rows in (one, four)]
  assert stock[1] > 8 * stock[0] > 0
  assert one["per_position"]["temporary_bytes"] > stock[0]


def test_the_report_is_written_anew_from_the_files_alone(call, out, results):
  report = (out / "attention.md").read_text()
  for pair in results["cases"][-1]["pairs"]:
    low, median, high = np.quantile(
      np.divide(pair["seconds"], pair["against_seconds"]), (0.25, 0.5, 0.75)
    )
    assert f"({low:.2f} to {high:.2f})" in report and f"{median:.2f}" in report
  for case in results["memory"]:
    for row in case["contestants"].values():
      assert f"{(row['temporary_bytes'] or 0) / 2**20:.1f} MiB" in report or row["refused"]
  (out / "attention.md").unlink()
  picture = out / "attention" / "here.png"
  assert f"](attention/{picture.name})" in report and picture.stat().st_size > 10_000
  assert call("benchmark", "--lengths=", f"--out={out}").status == 0
  assert (out / "attention.md").read_text() == report


def test_tables_are_tables(out):
  blocks = (out / "attention.md").read_text().split("\n\n")
  markdown_tables = [block.splitlines() for block in blocks if block.startswith("|")]
  assert len(markdown_tables) == 1 + 1 + 1 + 1
  for lines in markdown_tables:
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(
  "flag, words",
  [
    ("lengths=512,long", "--lengths 'long' 512,1024"),
    ("lengths=0", "--lengths '0'"),
    ("memory_lengths=-4", "--memory_lengths '-4'"),
    ("lengths=48", "--lengths 48 --tokens=4096"),
    ("implementations=fast", "--implementations 'fast' chunked"),
    ("implementations=", "--implementations '' chunked"),
    ("peers=tensorflow", "--peers 'tensorflow' torch_sdpa"),
    ("causal=maybe", "--causal 'maybe' no, yes, both"),
    ("passes=sideways", "--passes 'sideways' forward"),
    ("repetitions=0", "--repetitions is 0 at least 1"),
    ("max_distance=-1", "--max_distance is -1 at least 0"),
    ("repetitions=many", "--repetitions=many int"),
    ("out=/dev/null", "/dev/null --out"),
  ],
)
def test_a_mistake_is_one_line_before_anything_is_compiled(call, tmp_path, flag, words):
  answer = call("benchmark", f"--out={tmp_path}", f"--{flag}")
  assert (answer.status, answer.err.count("\n"), answer.num_compilations) == (2, 1, 0)
  assert not [word for word in words.split() if word not in answer.err], answer.err


def test_a_report_of_nothing(tmp_path):
  with pytest.raises(InputError, match=r"no results in .* measure first"):
    tables.write(tmp_path)


# Rows --------------------------------------------------------------------------------------------


def contestant(run=lambda: None, needed: int = 0) -> Contestant:
  return Contestant("none", "", lambda case: Prepared(run, 7, needed))


def fail():
  raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nat length")


@pytest.mark.parametrize(
  "entrant, words",
  [
    (contestant(needed=2**60), "it needs 1073741824.0 GiB of"),
    (contestant(fail), "RESOURCE_EXHAUSTED: Out of memory"),
  ],
)
def test_what_has_no_room_is_a_row_with_the_reason(entrant, words):
  row, runner = measurement._warm_up(entrant, CASE)
  assert row["refused"].startswith(words) and row["temporary_bytes"] == 7 and runner is None


def test_short_cases_are_repeated_more_often():
  effort = measurement.Effort(repetitions=3, seconds=1)
  plan = measurement._plan(CASE, {STOCK: contestant(), AGAIN: contestant()}, effort)
  assert plan.repetitions == 30 and plan.pairs == [(AGAIN, STOCK)]


def test_only_the_blockwise_are_held_against_others():
  names = [STOCK, AGAIN, "per_position", "chunked", "chunked (no relations)", "flex_attention"]
  against = [pair for pair in measurement.pairs_of(names) if pair[1] != STOCK]
  assert against == [("chunked", name) for name in (names[4], "per_position", "flex_attention")]


# Peers -------------------------------------------------------------------------------------------


def test_a_dense_bias_holds_the_relative_key_term():
  *arrays, relations = contestants.arguments(CASE._replace(backward=False))
  keys_only = relations.__class__(relations.key, None)
  found = jax.jit(partial(contestants._dense_bias, CASE))(*arrays, keys_only)
  wanted = jax.jit(partial(contestants._ours, "reference", CASE))(*arrays, keys_only)
  np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_pytorch_computes_the_same(is_causal):
  pytest.importorskip("torch")
  case = CASE._replace(backward=False, is_causal=is_causal)
  *arrays, relations = contestants.arguments(case)
  keys_only = relations.__class__(relations.key, None)
  for name, wanted in (
    ("torch_sdpa", contestants._jax_nn(case, *arrays, None)),
    ("flex_attention", jax.jit(partial(contestants._ours, "reference", case))(*arrays, keys_only)),
  ):
    found = measurement.PEERS[name].prepare(case).run()
    np.testing.assert_allclose(found.swapaxes(1, 2), wanted, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_pytorch_has_every_gradient(is_causal, monkeypatch):
  flex = pytest.importorskip("torch.nn.attention.flex_attention")
  # On CPUs it refuses to be differentiated, though what it runs there can be.
  monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
  case = CASE._replace(is_causal=is_causal)
  cotangent, *arrays, relations = contestants.arguments(case)
  keys_only = relations.__class__(relations.key, None)
  for name, attention, those in (
    ("torch_sdpa", contestants._jax_nn, None),
    ("flex_attention", partial(contestants._ours, "reference"), keys_only),
  ):
    _, pull_back = jax.vjp(partial(attention, case), *arrays, those)
    *of_tokens, of_relations = pull_back(cotangent)
    wanted = [gradient.swapaxes(1, 2) for gradient in of_tokens] + jax.tree.leaves(of_relations)
    found = measurement.PEERS[name].prepare(case).run()
    for gradient, of in zip(found, wanted, strict=True):
      np.testing.assert_allclose(gradient, of, atol=1e-5)


def test_without_a_gradient_there_is_no_time():
  pytest.importorskip("torch")
  forgets_its_table = torch_peers._prepare(torch_peers._sdpa, num_inputs=4, scores_at_once=1)
  row, runner = measurement._warm_up(Contestant("keys", "", forgets_its_table), CASE)
  assert "to not have been used in the graph" in row["refused"] and runner is None


@pytest.fixture
def compiled(monkeypatch):
  """FlexAttention as on GPUs, but for code and the usual limit; what has been compiled so far."""
  torch = pytest.importorskip("torch")
  graphs = []
  backend = lambda graph, inputs: graphs.append(graph) or graph.forward
  monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
  make = torch_peers._flex_attention.__wrapped__
  monkeypatch.setattr(torch_peers, "_flex_attention", functools.cache(lambda _: make("cuda")))
  torch._dynamo.reset()
  with torch._dynamo.config.patch(recompile_limit=2):
    yield graphs


def warm_up_flex_attention(length: int):
  case = CASE._replace(length=length, is_causal=False, backward=False)
  return measurement._warm_up(measurement.PEERS["flex_attention"], case)


def test_flex_attention_is_compiled_for_every_case(compiled):
  for number, length in enumerate(range(4, 8), 1):
    row, runner = warm_up_flex_attention(length)
    assert runner and len(compiled) == number, row


def test_flex_attention_that_is_not_compiled_has_no_time(compiled, monkeypatch):
  monkeypatch.setattr(torch_peers, "_MOST_CASES", 2)
  *_, (row, runner) = map(warm_up_flex_attention, (4, 5, 6))
  assert "compiled for 2 cases at most" in row["refused"] and runner is None


def test_without_pytorch_its_rows_say_so(monkeypatch):
  monkeypatch.setitem(sys.modules, "torch", None)
  for name in ("torch_sdpa", "flex_attention"):
    row, runner = measurement._warm_up(measurement.PEERS[name], CASE)
    assert "PyTorch is not installed" in row["refused"] and runner is None


# A training step ---------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch):
  """The positions and lengths of steps that were made; none is compiled."""
  ran = []
  make_stepper = lambda config, positions, length: lambda: ran.append((positions, length))
  monkeypatch.setattr(step_benchmark, "make_stepper", make_stepper)
  return ran


def test_a_training_step_is_held_against_its_sinusoidal_twin(call, data, ran):
  answer = call("step_benchmark", f"--config={data}/tiny.py", "--length=16", "--repetitions=6")
  assert answer.status == 0, answer.err
  rows = [line.split(" | ")[0] for line in answer.out.splitlines() if line.startswith("| ")]
  assert rows == ["| positions", "| sinusoidal", "| sinusoidal (again)", "| relative"]
  assert (ran.count(("relative", 16)), ran.count(("sinusoidal", 16))) == (6, 12)
  mistakes = "--length=0", "--length=100000", "--repetitions=0", "--config.model.positions"
  mistakes += ("--repetitions=8",)  # Not each would be as often first.
  for mistake in mistakes:
    value = "=sinusoidal" if "positions" in mistake else ""
    answer = call("step_benchmark", f"--config={data}/tiny.py", f"{mistake}{value}")
    assert (answer.status, answer.err.count("\n")) == (2, 1), answer.err
    assert answer.err.startswith(f"error: {mistake.removeprefix('--') if value else mistake}")
    assert ": give" in answer.err


def test_the_report_of_steps_is_rebuilt_from_every_single_time(call, data, ran, tmp_path):
  for name in ("one", "two"):
    flags = f"--config={data}/tiny.py", f"--config.name={name}", f"--out={tmp_path}"
    answer = call("step_benchmark", *flags, "--length=16", "--repetitions=12")
    assert answer.status == 0, answer.err
  text = (tmp_path / "steps.md").read_text()
  assert text.count("\n## ") == 2 and answer.out.split("\n## ")[-1].split("\n|")[0] in text
  results = json.loads((tmp_path / "steps" / "one-8x16.json").read_text())
  assert [len(of) for of in results["seconds"].values()] == 3 * [12]
  assert results["shape"] == [8, 16] and len(results["digest"]) == 12
  assert steps.write(tmp_path).read_text() == text
  for damage in (b"{}", b"", b"\xff"):
    (tmp_path / "steps" / "one-8x16.json").write_bytes(damage)
    with pytest.raises(InputError, match=f"^{tmp_path}/steps/one-8x16.json is not as") as raised:
      steps.write(tmp_path)
    assert str(raised.value).endswith(": restore or delete it")


def test_a_measurement_at_another_length_is_kept_beside_the_first(call, data, ran, tmp_path):
  for length in (8, 16):
    flags = f"--config={data}/tiny.py", f"--length={length}", "--repetitions=6"
    assert call("step_benchmark", *flags, f"--out={tmp_path}").status == 0
  assert len(list((tmp_path / "steps").iterdir())) == 2
  assert (tmp_path / "steps.md").read_text().count("\n## ") == 2


def test_a_rounds_ratio_is_to_the_mean_of_its_two_sinusoidal_steps():
  """A machine that slows down changes no ratio; medians over all rounds are of other rounds."""
  drift = np.array([1.0, 2.0, 3.0, 50.0, 60.0, 70.0])
  factors = {steps.TWIN: 0.9, steps.AGAIN: 1.1, "relative": 1.04}
  seconds = {name: (factor * drift).tolist() for name, factor in factors.items()}
  where = dict(devices="", cpu_cores=1, cpu="", date="", packages=dict(jax=""), command="")
  about = dict(name="", digest="", positions="relative", width=1, shape=(1, 1), dtype="")
  lines = steps.section(about | dict(environment=where | dict(git_commit=None), seconds=seconds))
  (row,) = [line for line in lines if line.startswith("| relative")]
  assert row.endswith("| 1.040 | 1.040 to 1.040 | 1.040 to 1.040 |")
  assert "at most 1.05 is shown" in lines[-2]


@pytest.mark.parametrize(
  "interval, told",
  [
    ((1.0, 1.05), "at most 1.05 is shown (1.0000 to 1.0500); the paper's 1.07 is above"),
    ((1.0, 1.08), "at most 1.05 is not shown (1.0000 to 1.0800); the paper's 1.07 is in"),
    ((1.051, 1.06), "at most 1.05 is not so (1.0510 to 1.0600); the paper's 1.07 is above"),
    ((1.08, 1.09), "at most 1.05 is not so (1.0800 to 1.0900); the paper's 1.07 is below"),
  ],
)
def test_what_is_said_of_the_price_follows_from_its_interval(interval, told):
  assert told in steps.verdict(interval)


def test_the_steps_that_are_committed_give_the_report(tmp_path):
  results = pathlib.Path(__file__).parents[2] / "results"
  shutil.copytree(results / "steps", tmp_path / "steps")
  assert steps.write(tmp_path).read_text() == (results / "steps.md").read_text()
