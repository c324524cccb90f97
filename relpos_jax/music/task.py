"""Music: pieces as tokens, a decoder alone, negative log-likelihood."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from relpos_jax.config import at_least, check_values
from relpos_jax.data.batching import Batches, Tokens
from relpos_jax.data.ragged import Ragged
from relpos_jax.data.tokenizer import BOS, EOS
from relpos_jax.errors import InputError
from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig
from relpos_jax.music import midi_folder, voices
from relpos_jax.music.attention_reach import attention_reach
from relpos_jax.music.codec import Codec, Music
from relpos_jax.music.likelihood import likelihood, make_nats_of
from relpos_jax.music.piano_roll import Reach, piano_roll
from relpos_jax.music.rows import MusicRows
from relpos_jax.music.sampler import Sampler
from relpos_jax.music.scores import rows_of, scores_of, table
from relpos_jax.training import task as tasks
from relpos_jax.training.loss import Loss, cross_entropy, shift_right
from relpos_jax.training.processes import is_first
from relpos_jax.training.sharding import AnyMesh
from relpos_jax.training.task import (
  Evaluation,
  Run,
  model_choices,
  model_values,
  own_copies,
  refusals_named,
)

_CHOICES = {
  "data.source": ("chorales", "midi"),
  "data.midi.codec": (*midi_folder.CODECS,),
} | model_choices(LanguageModelConfig)
_NUMBERS = (
  ("from 0 to 127", lambda x: 0 <= x <= 127, ("data.transpose",)),  # MIDI has 128 pitches
  at_least(1, "batches.valid_length"),
)
_MOST_DRAWN = 512  # tokens of a piece in a picture


class MusicTask:
  """The `Task` of telling how music goes on."""

  score = "NLL"

  def __init__(self, config: ConfigDict):
    self.config = config

  @property
  def codec(self) -> Codec:
    """How the music of `config.data` is written as tokens: the vocabulary."""
    data = self.config.data
    return voices.CODEC if data.source == "chorales" else midi_folder.CODECS[data.midi.codec]

  def check(self, sizes: Mapping[str, int]) -> None:
    check_values(self.config, _CHOICES, (*tasks.TOKEN_CHECKS, *_NUMBERS))
    tasks.check_batches(self.config, sizes)
    longest, alignment = self.config.batches.max_length, self.codec.alignment
    if longest <= alignment:
      raise InputError(f"config.batches.max_length is {longest}: give more than {alignment} tokens")
    _check_model(self.config, self.codec.vocab_size)

  def load_data(self) -> Music:
    data = self.config.data
    if data.source == "midi":
      music = midi_folder.load(**data.midi)
    else:
      from relpos_jax.music import chorales

      music = chorales.load(**data.chorales)
    if "valid" not in music.splits:
      raise InputError(
        f"none of the files in {data.midi.path} is for validation: put some into its sub-folder "
        "valid, and the others into train"
      )
    return music

  def learn_vocabulary(self, data: Music, workdir: pathlib.Path) -> Codec:
    return self.codec

  def load_vocabulary(self, workdir: pathlib.Path) -> Codec:
    return self.codec

  def save_vocabulary(self, vocabulary: Codec, workdir: pathlib.Path) -> None:
    """The config says it."""

  def mock_vocabulary(self) -> Codec:
    return self.codec

  def make_batches(self, data: Music, vocabulary: Codec, mesh: AnyMesh) -> tuple[Batches, Batches]:
    """Of pieces cut where they are too long; the valid ones are whole as far as they may be."""
    train, valid = (self._rows(data.splits[name], vocabulary, name) for name in ("train", "valid"))
    batches = self.config.batches
    make = tasks.batch_maker(self.config, train.lengths, mesh)
    make_valid = tasks.batch_maker(
      self.config, valid.lengths, mesh, max_length=max(batches.max_length, batches.valid_length)
    )
    return (
      make(train, kind=Tokens, seed=self.config.seed),
      make_valid(valid, kind=Tokens, seed=None),
    )

  def _rows(self, pieces: Sequence[np.ndarray], codec: Codec, split: str) -> MusicRows:
    batches, data = self.config.batches, self.config.data
    if split != "train":
      longest = max(batches.max_length, batches.valid_length)
      return MusicRows(pieces, longest=longest, alignment=codec.alignment)
    return MusicRows(
      pieces,
      longest=batches.max_length,
      alignment=codec.alignment,
      anew=batches.cut_anew,
      transpose=codec.transpose,
      semitones=data.transpose,
      seed=self.config.seed,
    )

  def mock_batches(self, mesh: AnyMesh) -> Batches:
    """Of pieces as long as a batch's rows may be."""
    longest = self.config.batches.max_length
    rows = max(1, self.config.batches.tokens // longest)
    pieces = Ragged.of([np.full(longest, EOS)] * rows)
    make = tasks.batch_maker(self.config, pieces.lengths, mesh)
    return make(pieces, kind=Tokens, seed=self.config.seed)

  def empty_batch(self, shape: tuple[int, ...]) -> Tokens:
    return Tokens(np.zeros(shape, np.int32))

  def make_model(self, vocabulary: Codec, rngs: nnx.Rngs) -> LanguageModel:
    return LanguageModel(language_config(self.config, vocabulary.vocab_size), rngs=rngs)

  def loss(self, model: LanguageModel, batch: Tokens, rngs: nnx.Rngs | None = None) -> Loss:
    smoothing = self.config.training.label_smoothing
    return language_loss(model, batch, rngs, bos=BOS, label_smoothing=smoothing)

  def make_report(self, run: Run, data: Music, batches: Batches):
    """Nothing besides the loss."""
    return lambda params: ({}, "")

  def evaluate(self, run: Run, data: Music, workdir: pathlib.Path) -> Evaluation | None:
    """The likelihood of whole pieces, and a picture of one and of what the model looked at."""
    params = own_copies(run.params)
    score = functools.partial(
      likelihood,
      make_nats_of(run.graphdef, params),
      times=run.vocabulary.times,
      token_budget=self.config.batches.tokens,
    )
    found = {name: score(data.splits[name]) for name in ("valid", "test") if name in data.splits}
    if not is_first():
      return None
    scores = {split: scores_of(of) for split, of in found.items()}
    results = {
      split: dict(pieces=of.num_pieces, tokens=of.num_tokens, **scores[split])
      for split, of in found.items()
    }
    rows = {split: rows_of(data.splits[split], of) for split, of in found.items()}
    tokens_drawn = data.splits["valid"][0][:_MOST_DRAWN]
    picture = draw(run, tokens_drawn, workdir / "piano_roll.png")
    text = table(found, is_published=self.config.data.source == "chorales")
    return Evaluation(text, results, scores, rows, (picture,))


def language_loss(
  model: LanguageModel,
  batch: Tokens,
  rngs: nnx.Rngs | None = None,
  *,
  bos: int,
  label_smoothing: float = 0.0,
) -> Loss:
  """The loss of every token, each told from those before it."""
  logits = model(shift_right(batch.tokens, bos), rngs=rngs)
  return cross_entropy(logits, batch.tokens, smoothing=label_smoothing)


def language_config(config: ConfigDict, vocab_size: int) -> LanguageModelConfig:
  """The model's own config, of `config.model`."""
  return LanguageModelConfig(vocab_size, **model_values(config))


def make_sampler(run: Run, context: int) -> Sampler:
  """Continues pieces with the trained model, up to so many tokens."""
  return Sampler(run.graphdef, run.params, context=context)


def draw(run: Run, piece: np.ndarray, path: pathlib.Path, prime: int = 0) -> pathlib.Path:
  """Draws a piece and where the model looks from its end; the first `prime` tokens are on grey."""
  codec, params = run.vocabulary, own_copies(run.params)
  times = codec.times(piece)
  weights = attention_reach(run.graphdef, params, np.concatenate([[BOS], piece]))
  reach = Reach(weights, np.append(0.0, times[:-1]), float(times[-1]))  # begin is at the first step
  since = float(times[prime]) if prime else 0
  return piano_roll(codec.spans(piece), path, step=codec.step, prime=since, reach=reach)


def _check_model(config: ConfigDict, vocab_size: int) -> None:
  """Traces training without computing: what the operator refuses, it refuses here."""
  with refusals_named():
    one_layer = dataclasses.replace(language_config(config, vocab_size), num_layers=1)
    _trace(one_layer, config.batches.max_length)


@functools.cache  # for the cells of a sweep: many have one model
def _trace(config: LanguageModelConfig, length: int) -> None:
  def run(rows):
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    return model(rows, rngs=nnx.Rngs(dropout=0))

  jax.eval_shape(run, jax.ShapeDtypeStruct((1, length), jnp.int32))
