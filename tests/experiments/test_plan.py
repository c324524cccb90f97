"""What chips that are not there would need: the page is made of its files, and mistakes are told.

pip install -e '.[tpu,test]' && pytest -m tpu -n0
"""

import json
import pathlib
import re
import shlex

import pytest

from experiments import command, plan
from experiments.planning import report, roofline, tables, topology
from experiments.tasks.translation import Translation
from relpos_jax.training.sharding import make_mesh

RESULTS = pathlib.Path(__file__).parents[2] / "results"
SMALL = (
  *("model.num_layers=1", "model.width=64", "model.num_heads=2", "model.feed_forward=96"),
  *("vocabulary.size=500", "batches.num_shapes=2", "model.dtype=float32"),
)


def small_config(*changes: str):
  """The paper's training with a model that is soon compiled."""
  changes = [f"--config.{change}" for change in (*SMALL, *changes)]
  root = pathlib.Path(__file__).parents[2]
  return command.parse(
    dict(config=command.CONFIG), [f"--config={root}/configs/wmt14.py", *changes]
  )["config"]


# --- what is compiled -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned(fast):
  """A plan for the eight simulated devices, as if they were chips."""
  with pytest.MonkeyPatch.context() as patch, fast():
    patch.setattr(plan, "compiler_version", lambda: "none")
    soon = ("positions=none", "dropout_rate=0", "embedding_dropout_rate=0")
    changes = [f"model.{change}" for change in soon]
    config = small_config("batches.tokens=256", "batches.max_length=16", *changes)
    mesh = make_mesh()
    shapes = Translation(config).mock_batches(mesh).shapes
    return plan.make_plan(config, "v5e:2x4", mesh, shapes[-1:]) | dict(name="wmt14-small")


def test_the_gradients_alone_are_summed_over_the_chips(planned):
  """Each parameter's, float32, with the loss and the number of its tokens.

  The embedding's comes from source, target and softmax: three sums, if XLA does not join them.
  """
  (step,) = planned["steps"]
  rows = step["collectives"]
  assert {*rows} == tables.EXPECTED
  others = rows["all-reduce"]["num_bytes"] - 4 * planned["parameters"] - 2 * 4
  assert others in (0, 4 * 500 * 64, 2 * 4 * 500 * 64)


def test_a_chip_holds_the_state_and_its_rows(planned):
  (step,) = planned["steps"]
  of_the_state = 4 * (3 * planned["parameters"] + 3)  # with two moments, and three counts
  of_the_batch = 2 * 4 * step["rows"] * step["length"] / 8
  assert step["argument_bytes"] == pytest.approx(of_the_state + of_the_batch, abs=64)
  assert step["peak_bytes"] > step["argument_bytes"]


def test_the_operations_are_those_of_the_matrices(planned):
  """Six for each number of a matrix and token, forward and backward; attention's come on top."""
  (step,) = planned["steps"]
  tokens = step["rows"] * step["length"] / 8
  assert 0.8 < step["flops"] / (6 * planned["parameters"] * tokens) < 2


def test_the_batches_are_of_the_tokens_and_devices_of_the_config():
  config = small_config("batches.num_shapes=8")
  shapes = Translation(config).mock_batches(make_mesh()).shapes
  assert len(shapes) == 8 and shapes[-1][1] == config.batches.max_length
  for rows, length in shapes:
    assert rows % 8 == 0 and rows * length < config.batches.tokens + 8 * length
    assert rows * length > config.batches.tokens - length


# --- the page -------------------------------------------------------------------------------------


def test_files_and_page_are_written_together(planned, tmp_path):
  """A page is of all plans whose names begin alike; tables of them all are in it."""
  folder = tmp_path / "plans"
  folder.mkdir()
  for name in ("other-small", "wmt14-small", "wmt14-again"):
    plan._write(folder, dict(planned, name=name))
  plans = report.read(folder)
  assert [each["name"] for each in plans] == ["other-small", "wmt14-again", "wmt14-small"]
  assert (tmp_path / "wmt14.md").read_text("utf-8") == report.page("wmt14", plans[1:])
  assert tables.tables(plans[1:]) in (tmp_path / "wmt14.md").read_text("utf-8")


PLANS = report.read(RESULTS / "plans")


@pytest.mark.parametrize("title", sorted({each["name"].partition("-")[0] for each in PLANS}))
def test_the_page_in_results_is_written_anew_from_its_files(title):
  """By hand: no figure."""
  plans = [each for each in PLANS if each["name"].partition("-")[0] == title]
  assert (RESULTS / f"{title}.md").read_text("utf-8") == report.page(title, plans)


@pytest.mark.parametrize("each", PLANS, ids=lambda each: each["name"])
def test_what_the_results_hold_was_expected(each):
  """Gradients are summed, those of matrices in bfloat16; nothing else is sent, and it fits."""
  for step in each["steps"]:
    assert {*step["collectives"]} <= tables.expected(each)
    whole = [step["collectives"].get(kind, {}) for kind in ("all-reduce", "reduce-scatter")]
    assert sum(row.get("num_bytes", 0) for row in whole) >= 2 * each["parameters"]
    assert step["peak_bytes"] <= roofline.CHIPS[each["chip"]].hbm


def test_how_a_training_scales_is_a_table_where_there_are_more_chips(planned):
  more = dict(planned, name="wmt14-more", num_chips=256, num_slices=2, topology="v5e:8x16")
  assert "Scaling" not in tables.tables([planned])
  text = tables.tables([planned, more | dict(effort="full")])
  of_more = [line for line in text.splitlines() if line.startswith("| wmt14-more ")]
  assert len(of_more) == 3 and all("256 x v5e (v5e:8x16, 2 slices)" in line for line in of_more)
  assert "## Scaling, an estimate" in text and "| 8 chips |" in of_more[-1]


def test_less_effort_is_said(planned):
  least = dict(planned, effort="least")
  assert "*least effort*" in report.page("wmt14", [least])
  assert "wmt14-small (least effort)" in tables.tables([least])
  assert "least effort" not in report.page("wmt14", [planned])


def test_tables_are_tables(planned):
  text = tables.tables([planned])
  blocks = [block for block in text.split("\n\n") if block.startswith("|")]
  assert len(blocks) == 3
  for block in blocks:
    assert len({line.count("|") for line in block.splitlines()}) == 1


def test_a_step_that_does_not_fit_is_a_row_with_the_compilers_words(planned):
  (step,) = planned["steps"]
  refused = dict(rows=step["rows"], length=step["length"], refused="Used 20G of 15.75G hbm")
  text = tables.tables([dict(planned, steps=[refused])])
  assert "| Used 20G of 15.75G hbm | 16 GB | no |" in text


def test_what_is_not_counted_is_said(planned):
  (step,) = planned["steps"]
  plain = dict(planned, steps=[step | dict(num_loops=0, num_kernels=0)])
  assert "\n- " not in tables.tables([plain])
  rows = step["collectives"] | {"all-gather": step["collectives"]["all-reduce"]}
  odd = dict(planned, steps=[step | dict(num_loops=2, num_kernels=3, collectives=rows)])
  text = tables.tables([odd])
  assert "2 loops, of which one pass is counted; 3 Pallas calls, by their word" in text
  assert "; unexpected: all-gather\n" in text


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "flags, words",
  [
    (["topology=v9:2x2"], "--topology=v9:2x2 v4, v5e, v5p, v6e v5e:2x4"),
    (["topology=v5e"], "--topology=v5e shape v5e:2x4"),
    (["topology=v5e:2x"], "--topology=v5e:2x shape"),
    (["topology=v5e:0x4"], "--topology=v5e:0x4 shape"),
    (["shapes=some"], "--shapes=some longest all"),
    (["effort=some"], "--effort=some full least"),
    (["num_slices=0"], "--num_slices=0 1 or more"),
    (["num_slices=2", "topology=v6e:4x4"], "--num_slices=2 v6e v5e, v5p"),
    (["config.batches.tokens=100"], "config.batches.tokens is 100 8 devices 128"),
    (["config.training.num_microbatches=999"], "32768 999 microbatches"),
    (["config.model.num_heads=3"], "config.model num_heads, 3"),
    (["out=/dev/null"], "/dev/null --out"),
    (["out={out}", "name=a/b"], "--name=a/b without a folder"),
    (["out={out}", "config.name=../b"], "--name=../b without a folder"),
    (["out={out}"], "cannot read {out}/plans/other.json delete it"),
  ],
)
def test_a_mistake_is_one_line_and_nothing_is_compiled(
  call, monkeypatch, request, tmp_path, flags, words
):
  (tmp_path / "plans").mkdir()
  (tmp_path / "plans" / "other.json").write_text("[]")
  flags, words = [flag.format(out=tmp_path) for flag in flags], words.format(out=tmp_path)
  monkeypatch.chdir(request.config.rootpath)
  monkeypatch.setattr(plan, "compiler_version", lambda: "none")
  flags = ["config.batches.max_length=16", "config.model.positions=none", *flags]
  answer = call("plan", "--config=configs/wmt14.py", *(f"--{flag}" for flag in flags))
  assert (answer.status, answer.err.count("\n"), answer.num_compilations) == (2, 1, 0), answer.err
  assert not [word for word in words.split() if word not in answer.err], answer.err


def test_no_compiler_for_tpus(call, monkeypatch, request):
  def missing(package):
    raise topology.importlib.metadata.PackageNotFoundError(package)

  monkeypatch.chdir(request.config.rootpath)
  monkeypatch.setattr(topology.importlib.metadata, "version", missing)
  answer = call("plan", "--config=configs/wmt14.py")
  expected = "error: no libtpu, the TPU's compiler: pip install -e '.[tpu]'\n"
  assert (answer.status, answer.err, answer.num_compilations) == (2, expected, 0)


def test_help_teaches_by_examples_that_parse(call, monkeypatch, request):
  monkeypatch.chdir(request.config.rootpath)
  out = call("plan", "--help").out
  examples = re.findall(r"python -m experiments\.plan ([^\n]*)", out.replace("\\\n", ""))
  assert len(examples) == 4
  assert all(command.parse(plan.FLAGS, shlex.split(example)) for example in examples)


# --- for a TPU ------------------------------------------------------------------------------------


@pytest.mark.tpu
@pytest.mark.parametrize("length", [128, 256])
def test_a_step_compiles_for_eight_chips(length, tmp_path, call, monkeypatch, request):
  """Long sequences take the TPU's own kernel, as on a TPU."""
  pytest.importorskip("libtpu")
  monkeypatch.chdir(request.config.rootpath)
  changes = [f"--config.{change}" for change in (*SMALL, f"batches.max_length={length}")]
  answer = call("plan", "--config=configs/wmt14.py", *changes, f"--out={tmp_path}", "--name=small")
  assert answer.status == 0, answer.err
  found = json.loads((tmp_path / "plans" / "small.json").read_text())
  (step,) = found["steps"]
  assert step["length"] == length and {*step["collectives"]} == tables.EXPECTED
  assert step["collectives"]["all-reduce"]["num_bytes"] >= 4 * found["parameters"]
  assert (step["num_kernels"] > 0) == (length == 256)
  assert answer.out.strip() in (tmp_path / "small.md").read_text()


@pytest.mark.tpu
@pytest.mark.parametrize(
  "file, topology, changes, kernels",
  [
    ("wmt14.py", ["topology=v5e:2x2", "num_slices=2"], ["batches.max_length=64"], False),
    ("long.py", ["topology=v5e:2x2"], ["mesh.sequence=4", "batches.max_length=4096"], True),
    ("long.py", ["topology=v5p:2x2x1"], ["mesh.sequence=4", "batches.max_length=4096"], True),
  ],
)
def test_steps_of_slices_and_of_long_sequences(
  file, topology, changes, kernels, tmp_path, call, monkeypatch, request
):
  """Compiled; what kernels say of themselves is more than the compiler sees."""
  pytest.importorskip("libtpu")
  monkeypatch.chdir(request.config.rootpath)
  known = [change for change in SMALL if file == "wmt14.py" or "vocabulary" not in change]
  changes = [f"config.{change}" for change in (*known, *changes)]
  flags = [*topology, *changes, "effort=least", f"out={tmp_path}", "name=small"]
  answer = call("plan", f"--config=configs/{file}", *(f"--{flag}" for flag in flags))
  assert answer.status == 0, answer.err
  (found,) = report.read(tmp_path / "plans")
  (step,) = found["steps"]
  assert tables.EXPECTED < {*step["collectives"]} <= tables.expected(found)
  assert (step["num_kernels"] > 0) == kernels
  if kernels:  # Of the last chip's 1,024 queries, two heads, 32 wide, and seven products.
    pairs = 1024 * 4096 - 2 * 512 * 512
    assert step["flops"] > 2 * 7 * 2 * 32 * pairs


@pytest.mark.tpu
def test_a_topology_that_the_compiler_does_not_know(call, monkeypatch, request):
  pytest.importorskip("libtpu")
  monkeypatch.chdir(request.config.rootpath)
  answer = call("plan", "--config=configs/wmt14.py", "--topology=v5e:3x5")
  assert (answer.status, answer.err.count("\n")) == (2, 1), answer.err
  assert "--topology=v5e:3x5" in answer.err
