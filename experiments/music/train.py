"""Trains a language model of music, and scores it by the likelihood of pieces.

The function `train` says what happens, in order. The command `experiments.train` calls
it.
"""

import functools

import jax
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from experiments.data.batching import Batches, Tokens
from experiments.data.tokenizer import BOS
from experiments.data.upstream import Corpus
from experiments.errors import InputError
from experiments.files import Path
from experiments.music import scores, voices
from experiments.music.data import (
  CODECS,
  MusicRows,
  load_chorales,
  load_midi_folder,
  write_skipped,
)
from experiments.music.midi_files import Codec
from experiments.training import loop, processes, results, start
from experiments.training.batches import configure_batches
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
from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig


def train(config: ConfigDict, workdir: Path, flags: loop.Flags) -> None:
  """Trains from the last checkpoint in the run directory, if any, and evaluates.

  The caller has checked the config. Nothing is written before all other inputs are
  checked. After a signal, saves the state and raises Stopped.
  """
  with processes.fail_together():
    data = load_data(config)
    for note in data.notes:
      print(note)

  codec = choose_codec(config)
  mesh = make_mesh(**config.mesh)
  with jax.set_mesh(mesh):
    steps = build(config, codec, mesh)
    run = Run(config, codec, mesh, steps.graphdef, steps.shapes.params)
    batches, valid_batches = make_batches(config, data, codec, mesh)
    start.print_sizes(run, batches, valid_batches)
    num_steps = start.count_steps(config.training, batches.num_per_epoch)
    digests = training_digest(batches.examples) | data_digests(data.splits)
    start.check_inputs(workdir, digests)

    with start.open_checkpoints(config.training, workdir) as checkpoints:
      state = start.restore(checkpoints, steps.shapes, workdir)
      start.write_start(run, state, workdir, num_steps, digests)
      if processes.is_first():
        write_skipped(data.bad_files, workdir)
      loop.train(
        run,
        steps,
        state,
        batches,
        valid_batches,
        num_steps=num_steps,
        checkpoints=checkpoints,
        workdir=workdir,
        flags=flags,
      )

  score_run(load_average(run, workdir), data, workdir)
  processes.wait_for_all("evaluated")


def check(config: ConfigDict) -> None:
  """Raises InputError if a row has no room for a token of each voice."""
  longest, alignment = config.batches.max_length, choose_codec(config).alignment
  if longest < alignment:
    raise InputError(
      f"config.batches.max_length is {longest}: give {alignment} or more, because "
      f"music is cut at multiples of {alignment} tokens"
    )


def load_data(config: ConfigDict) -> Corpus:
  """Loads the pieces of `config.data`, as tokens."""
  if config.data.source == "chorales":
    return load_chorales(**config.data.chorales)
  return load_midi_folder(**config.data.midi)


def choose_codec(config: ConfigDict) -> Codec:
  """Returns the codec of `config.data`, which takes the place of a vocabulary."""
  if config.data.source == "chorales":
    return voices.CODEC
  return CODECS[config.data.midi.codec]


mock_vocabulary = choose_codec


def make_batches(
  config: ConfigDict, data: Corpus, codec: Codec, mesh: AnyMesh
) -> tuple[Batches, Batches]:
  """Makes batches: shuffled ones for training, and ordered ones for validation.

  Training pieces longer than `max_length` are cut, and so are validation pieces longer
  than both `max_length` and `valid_length`.
  """
  settings = config.batches
  longest_valid = max(settings.max_length, settings.valid_length)
  train = MusicRows(
    data.splits["train"],
    codec,
    longest=settings.max_length,
    random_slices=settings.cut_anew,
    semitones=config.data.transpose,
    seed=config.seed,
  )
  valid = MusicRows(data.splits["valid"], codec, longest=longest_valid)
  make = configure_batches(config, train.lengths, mesh)
  make_valid = configure_batches(config, valid.lengths, mesh, max_length=longest_valid)
  return make(train, seed=config.seed), make_valid(valid, seed=None)


def empty_batch(shape: tuple[int, ...]) -> Tokens:
  """Returns a batch of padding with shape (rows, length)."""
  return Tokens(np.zeros(shape, np.int32))


def build(config: ConfigDict, codec: Codec, mesh: AnyMesh) -> Steps:
  """Builds model, optimizer and steps on a mesh, without computing or compiling."""
  schedule = learning_rate(config.training, config.model.width)
  return make_steps(
    functools.partial(make_model, config, codec),
    functools.partial(loss, smoothing=config.training.label_smoothing),
    optax.adam(schedule, b2=0.98, eps=1e-9),  # Shaw et al. 2018
    schedule,
    mesh,
    seed=config.seed,
    num_microbatches=config.training.num_microbatches,
    ring=config.mesh.ring,
  )


def make_model(config: ConfigDict, codec: Codec, rngs: nnx.Rngs) -> LanguageModel:
  """Makes the model of `config.model`, with random parameters."""
  values = model_values(config.model, LanguageModelConfig)
  return LanguageModel(LanguageModelConfig(codec.vocab_size, **values), rngs=rngs)


def loss(
  model: LanguageModel,
  batch: Tokens,
  rngs: nnx.Rngs | None = None,
  smoothing: float = 0.0,
) -> Loss:
  """Sums the cross-entropy of each token, given the tokens before it."""
  logits = model(shift_right(batch.tokens, BOS), rngs=rngs)
  return cross_entropy(logits, batch.tokens, smoothing=smoothing)


def load_run(config: ConfigDict, workdir: Path) -> Run:
  """Loads the trained model of a run directory; replicates it on all devices."""
  return load_trained(config, choose_codec(config), build, workdir)


def evaluate(config: ConfigDict, workdir: Path) -> None:
  """Scores the trained model of a run directory on the run's own data."""
  data = load_data(config)
  check_unchanged(workdir, data_digests(data.splits))
  score_run(load_run(config, workdir), data, workdir)


def score_run(run: Run, data: Corpus, workdir: Path) -> None:
  """Scores complete pieces; writes the scores and the run's record."""
  folder = results.choose_folder(run, workdir)
  evaluation = scores.evaluate(run, data, folder)
  results.report(evaluation, run, workdir, "NLL")
