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
import pytest
from run_files import metrics, read_json, results, signal_at, without

from experiments import command
from experiments import train as train_command
from experiments.systems import load_config
from experiments.training import loop
from experiments.training import loss as loss_module
from experiments.training import start as start_module
from experiments.training.checkpoint_reader import list_steps
from experiments.training.metrics import read_metrics
from experiments.training.step import learning_rate
from experiments.translation import scores as scores_module
from experiments.translation import train as train_module
from experiments.translation.scores import TITLES
from experiments.translation.train import load_run

FILES = """
config.json environment.json digests.json tokenizer.json checkpoints metrics.jsonl
tensorboard samples.txt record.json results.json test.translations.txt average.npz
learning_curves.png attention.png
"""


@pytest.fixture
def no_scores(monkeypatch):
  """Skips the scoring at the end of a training, which takes most of its time."""
  monkeypatch.setattr(train_module, "score_run", lambda *_: None)


def names(folder):
  return {path.name for path in folder.iterdir()}


def average(workdir):
  return load_run(load_config(workdir), workdir).params


# The files and the output
# --------------------------------------------------------------------------------------


def test_the_folder_holds_all_of_the_run(workdir, data):
  assert names(workdir) == {*FILES.split()}
  assert names(workdir / "checkpoints") == {"9", "12", "15"}
  config = read_json(workdir / "config.json")
  assert config["model"]["width"] == 16
  assert config["training"]["label_smoothing"] == 0.1
  environment = read_json(workdir / "environment.json")
  assert environment["packages"]["jax"] == jax.__version__
  for name in ("learning_curves.png", "attention.png"):
    assert (workdir / name).stat().st_size > 5_000


def test_every_step_is_measured_and_some_evaluated(workdir):
  lines = metrics(workdir)
  losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
  assert [*losses] == [*range(1, 16)]
  assert losses[15] < losses[1]
  first, second, last = [line for line in lines if "valid_loss" in line]
  assert (first["step"], second["step"], last["step"]) == (6, 12, 15)
  assert last["valid_loss"] < first["valid_loss"]
  assert 0 <= last["valid_bleu"] <= 100
  assert (workdir / "samples.txt").read_text("utf-8").count("translation ") == 6


def test_the_output_has_the_model_the_data_and_the_scores(training):
  workdir, answer = training
  size = sum(x.size for x in jax.tree.leaves(average(workdir)))
  for words in (
    f"devices: 1 x cpu, processes: 1, mesh: 1\nparameters: {size:,}, tokens",
    "attention: per_position, because",
    "pairs with an empty side skipped in train: 1 (lines: 53)\n",
    "training: shapes 14x9, ",
    f"{workdir}/learning_curves.png {workdir}/attention.png\n",
  ):
    assert words in answer.out
  (score,) = results(workdir).values()
  values = [f"{score[kind]['value']:.4g}" for kind in TITLES]
  assert ["test", "6", *values] in [line.split() for line in answer.out.splitlines()]
  assert answer.out.count("\ntranslation  ") == 5
  steps = [name for name in answer.compiled if "train_step" in name]
  assert len(steps) == 1  # for one shape of batches
  assert "step 15/15  loss" in answer.err


CHOICES = """
  data.pairs.test= data.moses=True data.lowercase=True evaluation.tokenize=none
  batches.tokens=270 training.warmup_steps=1 model.share_embeddings=False
  model.dtype=bfloat16 mesh.data=2 training.num_microbatches=2
  training.schedule=paper decoding.average_checkpoints=1
  model.implementation=projected
"""


@pytest.fixture(scope="module")
def other_run(train, tmp_path_factory):
  """Trains with other choices, in two starts.

  Returns the folder, the first answer and the mock of Weights & Biases.
  """
  folder = tmp_path_factory.mktemp("other")
  (folder / "valid.tsv").write_text("the dog sees a tree\tder Hund\n" * 4)
  flags = [f"--config.{choice}" for choice in CHOICES.split()]
  flags += [f"--config.data.pairs.valid={folder}/valid.tsv", "--wandb=mine"]
  wandb = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec("wandb", None))
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "wandb", wandb)
    five = "--config.training.num_steps=5", "--profile_steps=2:3"
    first = train(folder / "run", *flags, *five)
    second = train(folder / "run", *flags, "--config.training.num_steps=6")
  assert (first.status, second.status) == (0, 0), first.err + second.err
  return folder / "run", first, wandb


def test_a_step_has_its_rate_and_is_logged_and_profiled(other_run):
  workdir, _, wandb = other_run
  lines = [line for line in read_metrics(workdir) if "loss" in line]
  config = load_config(workdir)
  rates = learning_rate(config.training, config.model.width)
  for line in lines:
    rate = rates(line["step"] - 1)
    np.testing.assert_allclose(line["learning_rate"], rate, rtol=1e-6)
  log = wandb.init.return_value.__enter__.return_value.log
  logged = [call.args[0] | call.kwargs for call in log.call_args_list]
  steps = [values for values in logged if "loss" in values]
  assert steps == [without(line, "time") for line in lines]
  (profile,) = workdir.glob("tensorboard/plugins/profile/*/*.xplane.pb")
  assert b"train" in profile.read_bytes()
  ids = {call.kwargs["id"] for call in wandb.init.call_args_list}
  assert len(ids) == 1


@pytest.mark.parametrize(
  "flag, words",
  [
    ("--profile_steps=x", "10:20"),
    ("--profile_steps=20:10", "the first step first"),
    ("--wandb=mine", "pip install wandb"),
  ],
)
def test_flags_that_cannot_be_met_are_refused(train, tmp_path, flag, words):
  train(tmp_path / "run", flag).assert_refused(words)
  assert not (tmp_path / "run").exists()


# A run that goes on
# --------------------------------------------------------------------------------------


def test_a_finished_run_even_older_than_a_key_is_only_scored_again(
  training, call, train, run_copy, contents, monkeypatch
):
  workdir, answer = training
  config = read_json(run_copy / "config.json")
  del config["evaluation"]["subword_mark"]
  (run_copy / "config.json").write_text(json.dumps(config))
  (run_copy / "record.json").unlink()
  assert call("evaluate", f"--workdir={run_copy}").status == 0
  assert read_json(run_copy / "record.json") == read_json(workdir / "record.json")

  before = contents(run_copy)
  monkeypatch.setattr(loop, "take_steps", lambda *_, **__: pytest.fail())
  again = train(run_copy)
  assert again.status == 0, again.err
  assert f"{run_copy} is trained to step 15\n" in again.out
  scores = answer.out.partition("split")[2].replace(str(workdir), str(run_copy))
  assert again.out.partition("split")[2] == scores
  after = contents(run_copy)
  changed = {name for name in before | after if before.get(name) != after.get(name)}
  assert changed <= {"config.json", "results.json"}  # the key, and seconds


@pytest.fixture
def own_data(data, run_copy, trainer):
  """Returns a copy of the data, and a command that trains the run's copy on it."""
  folder = shutil.copytree(data, run_copy.with_name("data"))
  for name in ("config.json", "digests.json"):
    text = (run_copy / name).read_text()
    (run_copy / name).write_text(text.replace(str(data), str(folder)))
  return folder, trainer(f"{folder}/tiny.py")


def change_word(text):
  return text.replace(text.split()[1], "Tatze")


def sort_lines(text):
  return "".join(sorted(text.splitlines(keepends=True)))


def swap_entries(text):
  tokenizer = json.loads(text)
  entries = tokenizer["model"]["vocab"]
  entries["b"], entries["c"] = entries["c"], entries["b"]
  return json.dumps(tokenizer)


@pytest.mark.parametrize(
  "what, file, change, commands",
  [
    ("training data", "data/train.de", change_word, []),
    ("validation data", "data/valid.de", change_word, ["evaluate"]),
    ("test data D/test.en,D/test.de", "data/test.de", sort_lines, ["evaluate"]),
    ("tokenizer", "run/tokenizer.json", swap_entries, ["evaluate", "translate"]),
  ],
)
def test_a_run_does_not_go_on_with_other_data_or_another_tokenizer(
  own_data, run_copy, call, what, file, change, commands
):
  folder, train = own_data
  path = run_copy.parent / file
  path.write_text(change(path.read_text("utf-8")), encoding="utf-8")

  answers = [train(run_copy, "--config.training.num_steps=16")]
  answers += [call(name, f"--workdir={run_copy}") for name in commands]

  what = what.replace("D", str(folder))
  for answer in answers:
    answer.assert_refused(f"the {what} of {run_copy} changed since restore")


def test_an_older_run_goes_on_and_gets_the_digests_that_it_lacks(
  no_scores, own_data, run_copy
):
  _, train = own_data
  digests = read_json(run_copy / "digests.json")
  old = {"training data": digests["training data"]}
  (run_copy / "digests.json").write_text(json.dumps(old))
  assert train(run_copy).status == 0
  assert read_json(run_copy / "digests.json") == digests


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(
  no_scores, workdir, train, tmp_path, monkeypatch
):
  kill = mock.Mock(side_effect=KeyboardInterrupt)
  for owner, name in (
    (train_module.tok, "save_tokenizer"),
    (start_module, "write_digests"),
    (loop.Checkpoints, "save"),
  ):
    with monkeypatch.context() as patch:
      patch.setattr(owner, name, kill)
      assert train(tmp_path).status == 130
  assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
  with open(tmp_path / "metrics.jsonl", "a") as file:
    file.write('{"step": 4, "lo')  # killed while it wrote

  answer = train(tmp_path, "--config.training.num_steps=6")

  assert answer.status == 0, answer.err
  assert metrics(tmp_path) == [line for line in metrics(workdir) if line["step"] <= 6]


def test_a_run_whose_losses_are_not_finite_ends_with_the_step(
  train, parameters, tmp_path, monkeypatch
):
  def loss(logits, targets, **_):
    return loss_module.Loss(jnp.nan * logits.sum(), (targets != 0).sum())

  monkeypatch.setattr(train_module, "cross_entropy", loss)
  flags = "--config.training.max_skipped=4", "--config.training.save_every=2"

  answer = train(tmp_path, *flags)

  assert answer.status == 1
  last = answer.err.splitlines()[-1]
  assert last.startswith("stopped: step 4: loss nan, gradient norm nan on ")
  lines = [(x["step"], x["loss"], x["skipped"]) for x in metrics(tmp_path)]
  assert lines == [(step, None, 1) for step in (1, 2, 3, 4)]
  assert all(np.isfinite(x).all() for x in parameters(tmp_path, 2))


def test_a_signal_saves_and_the_same_command_goes_on_to_the_same_end(
  workdir, train, parameters, tmp_path, monkeypatch
):
  def interrupt(*_):
    signal.raise_signal(signal.SIGTERM)
    pytest.fail("evaluation goes on")

  # While it evaluates, at a step that is not saved otherwise.
  with monkeypatch.context() as patch:
    patch.setattr(scores_module, "make_translator", lambda *_, **__: interrupt)
    answer = train(tmp_path, "--config.training.save_every=4")
  last = "stopped by SIGTERM at step 6: run the same command again to resume"
  assert (answer.status, answer.out.splitlines()[-1]) == (143, last)
  assert names(tmp_path / "checkpoints") == {"4", "6"}

  with monkeypatch.context() as patch:
    patch.setattr(loop.Reporter, "step", signal_at(13, signal.SIGINT))
    answer = train(tmp_path)
  last = "stopped by SIGINT at step 14: run the same command again to resume"
  assert (answer.status, answer.out.splitlines()[-1]) == (130, last)
  assert metrics(tmp_path)[-1]["step"] == 14

  assert train(tmp_path).status == 0
  assert names(tmp_path / "checkpoints") == names(workdir / "checkpoints")
  ours, theirs = ((parameters(x, 15), average(x)) for x in (tmp_path, workdir))
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)
  assert metrics(tmp_path) == metrics(workdir)
  assert results(tmp_path) == results(workdir)
  ours, theirs = (x / "samples.txt" for x in (tmp_path, workdir))
  assert ours.read_bytes() == theirs.read_bytes()


def test_no_signal_cuts_short_what_is_reported_or_saved(train, tmp_path, monkeypatch):
  values, wait = loop.Reporter.values, loop.Checkpoints.wait

  def report_and_signal(*arguments):
    values(*arguments)
    signal.raise_signal(signal.SIGTERM)

  def signal_and_wait(checkpoints):
    if (tmp_path / "samples.txt").exists():  # after the evaluation
      signal.raise_signal(signal.SIGHUP)
    wait(checkpoints)

  monkeypatch.setattr(loop.Reporter, "values", report_and_signal)
  monkeypatch.setattr(loop.Checkpoints, "wait", signal_and_wait)
  answer = train(tmp_path, "--config.training.save_every=4")

  last = "stopped by SIGTERM at step 6: run the same command again to resume"
  assert (answer.status, answer.out.splitlines()[-1]) == (143, last)
  assert "valid_loss" in metrics(tmp_path)[-1]
  assert "=== step 6, valid" in (tmp_path / "samples.txt").read_text("utf-8")


def test_a_training_whose_reader_and_terminal_are_gone_saves_and_ends(
  data, fast, tmp_path, monkeypatch
):
  (reader, pipe), (other_end, terminal) = os.pipe(), os.openpty()
  os.close(reader)
  os.close(other_end)
  words = [f"--config={data}/tiny.py", f"--workdir={tmp_path}"]
  words += ["--config.training.num_steps=6"]

  def train() -> int:
    with (
      open(os.dup(pipe), "w") as stdout,
      open(os.dup(terminal), "w") as stderr,
      contextlib.redirect_stdout(stdout),
      contextlib.redirect_stderr(stderr),
      fast(),
      pytest.raises(SystemExit) as exit,
    ):
      command.run(train_command.main, train_command.FLAGS, words)
    return exit.value.code

  with monkeypatch.context() as patch:
    patch.setattr(loop.Reporter, "step", signal_at(2, signal.SIGHUP))
    assert train() == 128 + signal.SIGHUP
  (saved,) = list_steps(tmp_path / "checkpoints")
  assert saved == metrics(tmp_path)[-1]["step"] < 6
  assert train() == 0
  assert list_steps(tmp_path / "checkpoints") == [3, 6]
  os.close(pipe)
  os.close(terminal)


# Other choices
# --------------------------------------------------------------------------------------


def test_other_choices_train_too(other_run):
  workdir, answer, _ = other_run
  assert ": projected, because config.model.implementation names it" in answer.out
  assert "no test pairs to score" in answer.out
  assert not (workdir / "results.json").exists()


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
OWN = "own.gaussian:Gaussian"
PER_HEAD = "--config.model.tables_per_head=True"
OWN_FLAGS = f"--config.model.positions={OWN}", PER_HEAD


@pytest.fixture(scope="module")
def own_positions(tmp_path_factory):
  """Writes a module of positions where Python finds it: own/gaussian.py."""
  folder = tmp_path_factory.mktemp("modules")
  (folder / "own").mkdir()
  (folder / "own" / "gaussian.py").write_text(OWN_POSITIONS)
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(folder))
    yield
  for name in ("own", "own.gaussian"):
    sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def own_run(own_positions, train, finish):
  """Returns the folder of a run of one's own positions, and the command's answer."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(train_module, "score_run", lambda *_: None)  # takes long
    return finish(train, *OWN_FLAGS, "--config.training.num_steps=2")


def test_positions_of_ones_own_train_and_resume(
  no_scores, own_run, train, call, tmp_path
):
  workdir = shutil.copytree(own_run[0], tmp_path / "run")
  arrays = jax.tree.leaves(average(workdir))
  tables = [array for array in arrays if array.shape == (5, 2)]
  assert [bool(jnp.any(table != 0)) for table in tables] == [True, True]  # trained
  answer = call("translate", f"--workdir={workdir}", stdin=b"the dog sees a tree.\n")
  assert (answer.status, answer.out.count("\n")) == (0, 1), answer.err
  answer = train(workdir, *OWN_FLAGS, "--config.training.num_steps=3")
  assert f"{workdir} is trained to step 2" in answer.out, answer.err


@pytest.mark.parametrize(
  "name, words",
  [
    ("own.gausian:Gaussian", "No module named 'own.gausian' PYTHONPATH"),
    ("own/gaussian.py:Gaussian", "module:Class relative, sinusoidal"),
    ("own.gaussian:Gausian", "own.gaussian has no Gausian"),
    ("own.gaussian:number", "no subclass of relpos_jax.nn.Positions"),
    ("own.gaussian:Unbuildable", "'sigma' num_heads, head_width, max_distance"),
  ],
)
def test_wrong_positions_are_one_line(own_positions, train, tmp_path, name, words):
  answer = train(tmp_path / "run", f"--config.model.positions={name}", PER_HEAD)
  answer.assert_refused(f"error: config.model {words}")
  assert not (tmp_path / "run").exists()


def test_a_training_within_its_warmup_says_so(training, own_run):
  outputs = [answer.out for _, answer in (training, own_run)]
  notes = ["note: all steps are in the warmup" in out for out in outputs]
  assert notes == [False, True]
