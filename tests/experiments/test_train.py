"""Tests the files that training writes, and that it resumes bit for bit."""

import contextlib
import importlib.machinery
import json
import os
import shutil
import signal
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest

from experiments import command
from experiments import train as train_command
from experiments.systems import load_config
from experiments.training import loop
from experiments.training import loss as loss_module
from experiments.training.checkpoint_reader import list_steps
from experiments.training.metrics import read_metrics
from experiments.training.step import learning_rate
from experiments.translation import scores as scores_module
from experiments.translation import train as train_module
from experiments.translation.train import load_run


def metrics(workdir):
  """Returns the lines of metrics.jsonl without times."""
  timed = ("time", "tokens_per_second", "seconds_per_step")
  return [
    {k: v for k, v in line.items() if k not in timed} for line in read_metrics(workdir)
  ]


def results(workdir):
  """Returns results.json without times."""
  rows = json.loads((workdir / "results.json").read_text())
  return {
    split: {k: v for k, v in row.items() if k != "seconds"}
    for split, row in rows.items()
  }


def test_the_folder_holds_all_of_the_run(workdir, data):
  names = (
    "config.json environment.json digests.json tokenizer.json checkpoints metrics.jsonl"
  )
  names += " tensorboard samples.txt record.json results.json test.translations.txt average.npz"
  names += " learning_curves.png attention.png"
  assert {path.name for path in workdir.iterdir()} == {*names.split()}
  assert {path.name for path in (workdir / "checkpoints").iterdir()} == {"6", "9", "12"}
  assert [path.name.split(".")[0] for path in (workdir / "tensorboard").iterdir()] == [
    "events"
  ]
  config = json.loads((workdir / "config.json").read_text())
  assert config["model"]["width"] == 16 and config["training"]["label_smoothing"] == 0.1
  assert config["data"]["pairs"]["test"] == f"{data}/test.en,{data}/test.de"
  environment = json.loads((workdir / "environment.json").read_text())
  assert environment["packages"]["jax"] == jax.__version__
  for name in ("learning_curves.png", "attention.png"):
    with PIL.Image.open(workdir / name) as picture:
      picture.load()
      assert picture.format == "PNG" and min(picture.size) > 300


def test_every_step_is_measured_and_some_evaluated(workdir):
  lines = metrics(workdir)
  losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
  assert [*losses] == [*range(1, 13)] and losses[12] < losses[1]
  valid = {line["step"]: line for line in lines if "valid_loss" in line}
  assert [*valid] == [6, 12] and valid[12]["valid_loss"] < valid[6]["valid_loss"]
  assert all(0 <= line["valid_bleu"] <= 100 for line in valid.values())
  text = (workdir / "samples.txt").read_text(encoding="utf-8")
  assert text.count("=== step") == 2 and text.count("translation ") == 4


def test_the_output_has_the_model_the_data_the_scores_five_samples_and_the_pictures(
  training,
):
  workdir, answer = training
  size = sum(
    x.size for x in jax.tree.leaves(load_run(load_config(workdir), workdir).params)
  )
  lines = (
    "devices: 1 x cpu, processes: 1, mesh: 1",
    f"parameters: {size:,}, tokens of a batch: 128",
  )
  assert "\n".join(lines) in answer.out
  assert (
    sum("train_step" in name for name in answer.compiled) == 1
  )  # for one shape of batches
  assert (
    "attention, batches of 14x9: " in answer.out
    and ": per_position, because" in answer.out
  )
  assert "pairs with an empty side skipped in train: 1 (lines: 53)\n" in answer.out
  assert "training: shapes 14x9, " in answer.out and "dropped (above 9): " in answer.out
  assert "validation: shapes 14x9, batches per epoch: 1, " in answer.out
  (score,) = results(workdir).values()
  row = next(line for line in answer.out.splitlines() if line.split()[:1] == ["test"])
  values = (
    f"{score[name]['value']:.2f}"
    for name in ("sacrebleu", "paper_bleu", "chrf", "exact")
  )
  assert row.split() == ["test", "6", *values]
  for name in ("source  ", "reference  ", "translation  "):
    assert sum(line.startswith(name) for line in answer.out.splitlines()) == 5
  assert f"{workdir}/learning_curves.png {workdir}/attention.png\n" in answer.out
  assert "step 12/12  loss" in answer.err


def test_a_step_has_its_rate_and_is_logged_and_profiled(
  workdir, train, trainer, data, tmp_path, monkeypatch
):
  wandb = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec("wandb", None))
  monkeypatch.setitem(sys.modules, "wandb", wandb)
  run = wandb.init.return_value
  run.__enter__.return_value = run
  monkeypatch.setattr(
    train_module, "score_run", lambda *_: None
  )  # Scoring is for other tests.
  few = ("num_steps=5", "eval_every=5", "save_every=2")
  again = [f"--config.training.{value}" for value in few]
  assert train(tmp_path, *again, "--wandb=mine", "--profile_steps=2:3").status == 0
  lines = [line for line in read_metrics(tmp_path) if "loss" in line]
  rates = learning_rate(load_config(tmp_path))
  for line in lines:
    np.testing.assert_allclose(
      line["learning_rate"], rates(line["step"] - 1), rtol=1e-6
    )
  logged = [
    dict(*x.args, **x.kwargs) for x in run.log.call_args_list if "loss" in x.args[0]
  ]
  assert logged == [{k: x for k, x in line.items() if k != "time"} for line in lines]
  profiles = [*tmp_path.glob("tensorboard/plugins/profile/*/*.xplane.pb")]
  assert len(profiles) == 1 and b"train" in profiles[0].read_bytes()
  more = ["--config.training.num_steps=6", "--wandb=mine"]
  assert train(tmp_path, *again[1:], *more).status == 0
  first, second = (x.kwargs for x in wandb.init.call_args_list)
  assert first["id"] == second["id"] and second["resume"] == "allow"
  assert run.__exit__.call_count == 2


def test_flags_that_cannot_be_met_are_refused(train, tmp_path):
  for flag, words in (
    ("--profile_steps=x", "10:20"),
    ("--wandb=mine", "pip install wandb"),
  ):
    train(tmp_path / "run", flag).assert_refused(words)
  assert not (tmp_path / "run").exists()


def test_a_finished_run_even_older_than_a_key_is_only_scored_again(
  training, call, train, run_copy, contents, monkeypatch
):
  (workdir, answer), copy = training, run_copy
  config = json.loads((copy / "config.json").read_text())
  del config["evaluation"]["subword_mark"]
  (copy / "config.json").write_text(json.dumps(config))
  (copy / "record.json").unlink()
  lines = (copy / "metrics.jsonl").read_text()  # as of `training.score_tests`
  (copy / "metrics.jsonl").write_text(
    lines.replace('"valid_exact"', '"test_exact": 5, "valid_exact"')
  )
  for name in ("evaluate", "translate"):
    assert call(name, f"--workdir={copy}", stdin=b"a cat\n").status == 0
  records = [
    json.loads((folder / "record.json").read_text()) for folder in (copy, workdir)
  ]
  assert records[0]["config"] == records[1]["config"]
  assert records[0]["digest"] == records[1]["digest"]
  assert records[0]["exact"] == records[1]["exact"] | dict(test=[[6, 5], [12, 5]])
  before = contents(copy)
  monkeypatch.setattr(loop, "announce_attention", lambda *_: lambda *_: pytest.fail())
  again = train(copy)
  assert (again.status, f"{copy} is trained to step 12\n" in again.out) == (0, True)
  scores = answer.out.partition("split")[2].replace(str(workdir), str(copy))
  assert again.out.partition("split")[2] == scores
  after = contents(copy)
  changed = {name for name in before | after if before.get(name) != after.get(name)}
  # The key, the date, and seconds.
  assert changed <= {"config.json", "environment.json", "results.json", "record.json"}


def test_a_run_does_not_go_on_with_other_data_or_another_tokenizer(
  data, workdir, trainer, call, tmp_path
):
  folder, run = shutil.copytree(data, tmp_path / "data"), tmp_path / "run"
  train = trainer(f"{folder}/tiny.py", "training.eval_every=2")
  assert train(run, "--config.training.num_steps=2").status == 0

  def refused(what, path, change, *commands):
    before = path.read_text(encoding="utf-8")
    path.write_text(change(before), encoding="utf-8")
    assert before != path.read_text(encoding="utf-8")
    answers = [train(run, "--config.training.num_steps=3")]
    answers += [call(name, f"--workdir={run}") for name in commands]
    path.write_text(before, encoding="utf-8")
    for answer in answers:
      answer.assert_refused(f"the {what} of {run} changed since restore")

  other_word = lambda text: text.replace(text.split()[1], "Tatze")
  refused("training data", folder / "train.de", other_word)
  refused("validation data", folder / "valid.de", other_word, "evaluate")
  test_data = f"test data {folder}/test.en,{folder}/test.de"
  in_order = lambda text: "".join(sorted(text.splitlines(keepends=True)))
  refused(test_data, folder / "test.de", in_order, "evaluate")
  swap = _with_two_entries_swapped
  refused("tokenizer", run / "tokenizer.json", swap, "evaluate", "translate")

  digests = json.loads((run / "digests.json").read_text())
  for old in (
    {},
    {"training data": digests["training data"]},
  ):  # as of runs from before the others
    (run / "digests.json").write_text(json.dumps(old))
    test = f"--config.data.pairs.test={data}/test.en,{data}/test.de"
    for new in ((), (test,)):
      assert train(run, "--config.training.num_steps=3", *new).status == 0
    (added,) = json.loads((run / "digests.json").read_text()).items() - digests.items()
    assert added[0].startswith("test data") and added[1] in digests.values()


def _with_two_entries_swapped(text):
  tokenizer = json.loads(text)
  entries = tokenizer["model"]["vocab"]
  entries["b"], entries["c"] = entries["c"], entries["b"]
  return json.dumps(tokenizer)


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(
  workdir, train, tmp_path, monkeypatch
):
  for owner, name in (
    (train_module.tok, "save_tokenizer"),
    (train_module, "write_digests"),
    (loop.Checkpoints, "save"),
  ):
    with monkeypatch.context() as patch:
      patch.setattr(owner, name, mock.Mock(side_effect=KeyboardInterrupt))
      assert train(tmp_path).status == 130
  assert not any((tmp_path / "checkpoints").iterdir())
  assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
  with open(tmp_path / "metrics.jsonl", "a") as file:
    file.write('{"step": 4, "lo')  # killed while it wrote
  monkeypatch.setattr(
    train_module, "score_run", lambda *_: None
  )  # Scoring is for other tests.
  answer = train(tmp_path, "--config.training.num_steps=6")
  assert answer.status == 0, answer.err
  assert metrics(tmp_path) == [line for line in metrics(workdir) if line["step"] <= 6]


def test_a_run_whose_losses_are_not_finite_ends_with_the_step(
  train, parameters, tmp_path, monkeypatch
):
  def loss(logits, targets, **_):
    return loss_module.Loss(jnp.nan * logits.sum(), (targets != 0).sum())

  monkeypatch.setattr(train_module, "cross_entropy", loss)
  answer = train(
    tmp_path, "--config.training.max_skipped=4", "--config.training.save_every=2"
  )
  last = answer.err.splitlines()[-1]
  assert answer.status == 1 and last.startswith(
    "stopped: step 4: loss nan, gradient norm nan on "
  )
  skipped = [
    (line["step"], line["loss"], line["skipped"]) for line in metrics(tmp_path)
  ]
  assert skipped == [(step, None, 1) for step in (1, 2, 3, 4)]
  assert all(np.isfinite(x).all() for x in parameters(tmp_path, 2))


def _interrupt_at(step, interrupt):
  report = loop.Reporter.step

  def interrupted(self, now, metrics):
    if now == step:
      interrupt()
    report(self, now, metrics)

  return interrupted


def test_a_signal_saves_and_the_same_command_goes_on_to_the_same_end(
  longer, train, parameters, tmp_path, monkeypatch
):
  straight, handler = longer, signal.getsignal(signal.SIGTERM)
  with (
    monkeypatch.context() as patch
  ):  # while it evaluates, at a step that is not saved otherwise
    translate = lambda *_: (
      signal.raise_signal(signal.SIGTERM) or pytest.fail("evaluation goes on")
    )
    patch.setattr(scores_module, "make_translator", lambda *_, **__: translate)
    answer = train(tmp_path, "--config.training.save_every=4")
  assert (answer.status, answer.out.splitlines()[-1]) == (
    143,
    "stopped by SIGTERM at step 6: run the same command again to resume",
  )
  assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"4", "6"}
  assert not (tmp_path / "samples.txt").exists()

  with monkeypatch.context() as patch:
    interrupt = lambda: signal.raise_signal(signal.SIGINT)
    patch.setattr(loop.Reporter, "step", _interrupt_at(13, interrupt))
    answer = train(tmp_path, "--config.training.num_steps=15")
  last = "stopped by SIGINT at step 14: run the same command again to resume"
  assert (answer.status, answer.out.splitlines()[-1]) == (130, last)
  assert metrics(tmp_path)[-1]["step"] == 14 and not (tmp_path / "record.json").exists()

  assert train(tmp_path, "--config.training.num_steps=15").status == 0
  assert signal.getsignal(signal.SIGTERM) == handler
  assert list_steps(tmp_path / "checkpoints") == list_steps(straight / "checkpoints")
  for ours, theirs in zip(
    parameters(tmp_path, 15), parameters(straight, 15), strict=True
  ):
    np.testing.assert_array_equal(ours, theirs)
  averages = (
    jax.tree.leaves(load_run(load_config(folder), folder).params)
    for folder in (tmp_path, straight)
  )
  for ours, theirs in zip(*averages, strict=True):
    np.testing.assert_array_equal(ours, theirs)
  assert metrics(tmp_path) == metrics(straight) and results(tmp_path) == results(
    straight
  )
  assert (tmp_path / "samples.txt").read_bytes() == (
    straight / "samples.txt"
  ).read_bytes()


@pytest.mark.parametrize(
  "open_display, number", [(os.pipe, signal.SIGINT), (os.openpty, signal.SIGHUP)]
)
def test_a_training_whose_reader_or_terminal_is_gone_saves_and_ends(
  open_display, number, data, fast, tmp_path, monkeypatch
):
  reader, writer = open_display()
  os.close(reader)
  words = (
    f"--config={data}/tiny.py",
    f"--workdir={tmp_path}",
    "--config.training.num_steps=6",
  )

  def train() -> int:
    with contextlib.ExitStack() as stack:
      stdout, stderr = (
        stack.enter_context(open(os.dup(writer), "w")) for _ in range(2)
      )
      stack.enter_context(contextlib.redirect_stdout(stdout))
      stack.enter_context(contextlib.redirect_stderr(stderr))
      stack.enter_context(fast())
      with pytest.raises(SystemExit) as exit:
        command.run(train_command.main, train_command.FLAGS, words)
    return exit.value.code

  with monkeypatch.context() as patch:
    interrupt = lambda: signal.raise_signal(number)
    patch.setattr(loop.Reporter, "step", _interrupt_at(2, interrupt))
    assert train() == 128 + number
  (saved,) = list_steps(tmp_path / "checkpoints")
  assert saved == metrics(tmp_path)[-1]["step"] < 6
  assert train() == 0
  assert list_steps(tmp_path / "checkpoints") == [3, 6] and results(tmp_path)
  os.close(writer)


def test_other_choices_train_too(train, data, tmp_path):
  english, german = (
    (data / f"valid.{x}").read_text().splitlines() for x in ("en", "de")
  )
  table = "".join(f"{x}\t{y}\n" for x, y in zip(english, german, strict=True))
  (tmp_path / "valid.tsv").write_text(table)
  answer = train(
    tmp_path / "run",
    *(f"--config.data.pairs.valid={tmp_path}/valid.tsv", "--config.data.pairs.test="),
    *(
      "--config.data.moses",
      "--config.data.lowercase",
      "--config.evaluation.tokenize=none",
    ),
    *("--config.batches.tokens=270", "--config.training.warmup_steps=1"),
    *("--noconfig.model.share_embeddings", "--config.model.dtype=bfloat16"),
    *("--config.mesh.data=2", "--config.training.num_microbatches=2"),
    *("--config.training.schedule=paper", "--config.training.num_steps=2"),
    *(
      "--config.decoding.average_checkpoints=1",
      "--config.model.implementation=projected",
    ),
  )
  assert answer.status == 0, answer.err
  assert ": projected, because config.model.implementation names it" in answer.out
  assert "shapes 32x9, " in answer.out and "no test pairs to score" in answer.out
  assert "--pairs=source_file,target_file or --pairs=file.tsv\n" in answer.out
  assert f"pictures: {tmp_path}/run/learning_curves.png\n" in answer.out
  names = {path.name for path in (tmp_path / "run").iterdir()}
  assert "tokenizer.json" in names and "results.json" not in names


OWN_POSITIONS = """
import jax.numpy as jnp
from flax import nnx
from relpos_jax import DistanceBias
from relpos_jax.nn import Positions

class Gaussian(Positions):
  def __init__(self, num_heads, max_distance, *, rngs):
    self.table = nnx.Param(jnp.zeros((2 * max_distance + 1, num_heads)))

  def __call__(self):
    return DistanceBias(self.table[...])

class Unbuildable(Gaussian):
  def __init__(self, sigma, *, rngs):
    pass

number = 3
"""


@pytest.fixture
def own_positions(tmp_path, monkeypatch):
  """Writes a module of positions where Python finds it: own/gaussian.py."""
  (tmp_path / "own").mkdir()
  (tmp_path / "own" / "gaussian.py").write_text(OWN_POSITIONS)
  monkeypatch.syspath_prepend(str(tmp_path))
  yield
  for name in ("own", "own.gaussian"):
    sys.modules.pop(name, None)


def test_positions_of_ones_own_train_and_resume(own_positions, train, call, tmp_path):
  name = "own.gaussian:Gaussian"
  workdir = tmp_path / "run"
  flags = f"--config.model.positions={name}", "--config.model.tables_per_head=True"
  answer = train(workdir, *flags, "--config.training.num_steps=2")
  assert answer.status == 0, answer.err
  assert json.loads((workdir / "config.json").read_text())["model"]["positions"] == name
  arrays = jax.tree.leaves(load_run(load_config(workdir), workdir).params)
  tables = [array for array in arrays if array.shape == (5, 2)]
  assert len(tables) == 2  # of encoder and decoder
  assert all(jnp.any(table != 0) for table in tables)  # they were trained
  answer = call("translate", f"--workdir={workdir}", stdin=b"the dog sees a tree.\n")
  assert (answer.status, answer.out.count("\n")) == (0, 1), answer.err
  answer = train(workdir, *flags, "--config.training.num_steps=3")
  assert answer.status == 0 and f"{workdir} is trained to step 2" in answer.out


@pytest.mark.parametrize(
  "name, words",
  [
    ("own.gausian:Gaussian", "No module named 'own.gausian' PYTHONPATH"),
    ("own/gaussian.py:Gaussian", "module:Class relative, sinusoidal"),
    ("own.gaussian:Gausian", "own.gaussian has no Gausian"),
    ("own.gaussian:number", "number no subclass of relpos_jax.nn.Positions"),
    ("flax.nnx:Linear", "Linear no subclass of relpos_jax.nn.Positions"),
    (
      "own.gaussian:Unbuildable",
      "Unbuildable 'sigma' num_heads, head_width, max_distance",
    ),
  ],
)
def test_wrong_positions_are_one_line(own_positions, train, tmp_path, name, words):
  flags = f"--config.model.positions={name}", "--config.model.tables_per_head=True"
  answer = train(tmp_path / "run", *flags)
  answer.assert_refused(f"error: config.model {words}")
  assert not (tmp_path / "run").exists()


def test_positions_without_their_module(own_positions, train, call, tmp_path):
  workdir = tmp_path / "run"
  name = "own.gaussian:Gaussian"
  flags = f"--config.model.positions={name}", "--config.model.tables_per_head=True"
  assert train(workdir, *flags, "--config.training.num_steps=1").status == 0
  (tmp_path / "own" / "gaussian.py").unlink()
  del sys.modules["own.gaussian"]
  shutil.rmtree(tmp_path / "own" / "__pycache__", ignore_errors=True)
  for command_name in ("translate", "evaluate"):
    answer = call(command_name, f"--workdir={workdir}", stdin=b"a cat\n")
    answer.assert_refused(f"{name} No module named own.gaussian PYTHONPATH")


def test_a_training_within_its_warmup_says_so(training, train, tmp_path):
  note = "note: all steps are in the warmup"
  assert note not in training[1].out
  answer = train(tmp_path / "run", "--config.training.num_steps=4")
  (line,) = [line for line in answer.out.splitlines() if note in line]
  assert answer.status == 0 and "--config.training.warmup_steps" in line
