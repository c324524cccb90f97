"""Trains an encoder and a decoder to translate sentences, and scores them by BLEU.

The function `train` says what happens, in order. The command `experiments.train` calls
it.
"""

import functools

import jax
import optax
from flax import nnx
from ml_collections import ConfigDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from experiments.data import tokenizer as tok
from experiments.data.batching import Batch
from experiments.files import Path
from experiments.training import loop, processes, results, start
from experiments.training.loss import Loss, cross_entropy, shift_right
from experiments.training.model import model_values
from experiments.training.run import Run, load_average, load_trained
from experiments.training.sharding import AnyMesh, make_mesh
from experiments.training.step import Steps, learning_rate, make_steps
from experiments.training.workdir import (
  check_unchanged,
  data_digests,
  training_digest,
)
from experiments.translation import scores
from experiments.translation.corpus import Corpus
from experiments.translation.data import check as check  # for commands
from experiments.translation.data import empty_batch as empty_batch  # for commands
from experiments.translation.data import learn_vocabulary, load_data, make_batches
from relpos_jax.models.seq2seq import Transformer, TransformerConfig


def train(config: ConfigDict, workdir: Path, flags: loop.Flags) -> None:
  """Trains from the last checkpoint in the run directory, if any, and evaluates.

  The caller has checked the config. Nothing is written before all other inputs are
  checked. After a signal, saves the state and raises Stopped.
  """
  with processes.fail_together():
    data = load_data(config)
    for note in data.notes:
      print(note)
    vocabulary = learn_vocabulary(config, data, workdir)

  mesh = make_mesh(**config.mesh)
  with jax.set_mesh(mesh):
    steps = build(config, vocabulary, mesh)
    run = Run(config, vocabulary, mesh, steps.graphdef, steps.shapes.params)
    batches, valid_batches = make_batches(config, data, vocabulary, mesh)
    start.print_sizes(run, batches, valid_batches)
    num_steps = start.count_steps(config.training, batches.num_per_epoch)
    digests = training_digest(batches.examples)
    digests |= data_digests(data.splits, data.test_files)
    start.check_inputs(workdir, digests)

    with start.open_checkpoints(config.training, workdir) as checkpoints:
      state = start.restore(checkpoints, steps.shapes, workdir)
      save = functools.partial(tok.save_tokenizer, vocabulary, workdir)
      start.write_start(run, state, workdir, num_steps, digests, save)
      loop.train(
        run,
        steps,
        state,
        batches,
        valid_batches,
        num_steps=num_steps,
        score=scores.make_score(run, data),
        checkpoints=checkpoints,
        workdir=workdir,
        flags=flags,
      )

  score_run(load_average(run, workdir), data, workdir)
  processes.wait_for_all("evaluated")


def build(config: ConfigDict, vocabulary: Tokenizer, mesh: AnyMesh) -> Steps:
  """Builds model, optimizer and steps on a mesh, without computing or compiling."""
  schedule = learning_rate(config.training, config.model.width)
  return make_steps(
    functools.partial(make_model, config, vocabulary),
    functools.partial(loss, smoothing=config.training.label_smoothing),
    optax.adam(schedule, b2=0.98, eps=1e-9),  # Shaw et al. 2018
    schedule,
    mesh,
    seed=config.seed,
    num_microbatches=config.training.num_microbatches,
    ring=config.mesh.ring,
  )


def make_model(
  config: ConfigDict, vocabulary: Tokenizer, rngs: nnx.Rngs
) -> Transformer:
  """Makes the model of `config.model`, with random parameters."""
  size = vocabulary.get_vocab_size()
  values = model_values(config.model, TransformerConfig)
  return Transformer(TransformerConfig(size, size, **values), rngs=rngs)


def mock_vocabulary(config: ConfigDict) -> Tokenizer:
  """Makes a placeholder vocabulary of the configured size, for a model's shapes."""
  entries = {str(number): number for number in range(config.vocabulary.size)}
  return Tokenizer(WordLevel(entries, unk_token="0"))


def loss(
  model: Transformer, batch: Batch, rngs: nnx.Rngs | None = None, smoothing: float = 0.0
) -> Loss:
  """Sums the loss of each target token, given the source and the tokens before it."""
  logits = model(batch.source, shift_right(batch.target, tok.BOS), rngs=rngs)
  return cross_entropy(logits, batch.target, smoothing=smoothing)


def load_run(config: ConfigDict, workdir: Path) -> Run:
  """Loads the trained model of a run directory; replicates it on all devices.

  Raises InputError if the tokenizer is not the one that the run was trained with.
  """
  check_unchanged(workdir)
  return load_trained(config, tok.load_tokenizer(workdir), build, workdir)


def evaluate(config: ConfigDict, workdir: Path) -> None:
  """Scores the trained model of a run directory on the run's own test sets."""
  data = load_data(config, with_train=False)
  check_unchanged(workdir, data_digests(data.splits, data.test_files))
  score_run(load_run(config, workdir), data, workdir)


def score_run(run: Run, data: Corpus, workdir: Path) -> None:
  """Translates the test sets; writes scores, translations and the run's record."""
  translated = scores.translate_tests(run, data)
  folder = results.choose_folder(run, workdir)
  evaluation = scores.evaluate(run, translated, folder)
  results.report(evaluation, run, workdir, "BLEU")
