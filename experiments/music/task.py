"""The music task: data, batches, model, loss, evaluation and samples of music."""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.config import LARGEST, between, check_values
from experiments.data.batching import Batches, Tokens, bucket_boundaries
from experiments.data.tokenizer import BOS, EOS, PAD, Ragged
from experiments.data.upstream import Corpus
from experiments.files import Path
from experiments.music import voices
from experiments.music.data import CODECS, MusicRows, load_chorales, load_midi_folder
from experiments.music.midi_files import Codec
from experiments.music.piano_roll import draw
from experiments.training import task as tasks
from experiments.training.metrics import track
from experiments.training.processes import is_first
from experiments.training.sharding import AnyMesh
from experiments.training.task import (
  Evaluation,
  Loss,
  Run,
  cross_entropy,
  own_copies,
  shift_right,
)
from relpos_jax.decoding.sampling import UNCHANGED, SamplingParams, sample
from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig
from relpos_jax.models.layers import decoding_model
from relpos_jax.typing import Array, Float, Int, PyTree

_CHOICES = {
  "data.source": ("chorales", "midi"),
  "data.midi.codec": (*CODECS,),
} | tasks.model_choices(LanguageModelConfig)
_NUMBERS = (
  between(0, 127, "data.transpose"),  # MIDI has 128 pitches
  between(1, LARGEST, "batches.valid_length"),
)
_TOKENS_DRAWN = 512  # of a piece in a picture

# Huang et al. 2018, table 2: nats per token on the valid split of the chorales. Quoted
# second hand, not checked against the paper.
PUBLISHED = {"relative": 0.357, "sinusoidal": 0.398}
_NUM_SHAPES = 4  # of batches: each is compiled once


class MusicTask(tasks.Task):
  """The `Task` of predicting the next token of a piece."""

  score = "NLL"

  @property
  def codec(self) -> Codec:
    """Returns the codec of `config.data`; it is the vocabulary."""
    data = self.config.data
    return voices.CODEC if data.source == "chorales" else CODECS[data.midi.codec]

  def check(self, sizes: Mapping[str, int]) -> None:
    check_values(self.config, _CHOICES, (*tasks.TOKEN_CHECKS, *_NUMBERS))
    tasks.check_batches(self.config, sizes)

  def load_data(self) -> Corpus:
    data = self.config.data
    if data.source == "chorales":
      return load_chorales(**data.chorales)
    return load_midi_folder(**data.midi)

  def load_vocabulary(self, workdir: Path) -> Codec:
    return self.codec

  def mock_vocabulary(self) -> Codec:
    return self.codec

  def make_batches(
    self, data: Corpus, vocabulary: Codec, mesh: AnyMesh
  ) -> tuple[Batches, Batches]:
    """Returns batches of pieces, sliced if longer than `max_length`, or `valid_length` if valid."""
    batches, seed = self.config.batches, self.config.seed
    longest_valid = max(batches.max_length, batches.valid_length)
    options = dict(
      random_slices=batches.cut_anew, semitones=self.config.data.transpose, seed=seed
    )
    train = MusicRows(
      data.splits["train"], vocabulary, longest=batches.max_length, **options
    )
    valid = MusicRows(data.splits["valid"], vocabulary, longest=longest_valid)
    make = tasks.batch_maker(self.config, train.lengths, mesh)
    make_valid = tasks.batch_maker(
      self.config, valid.lengths, mesh, max_length=longest_valid
    )
    return make(train, seed=seed), make_valid(valid, seed=None)

  def empty_batch(self, shape: tuple[int, ...]) -> Tokens:
    return Tokens(np.zeros(shape, np.int32))

  def make_model(self, vocabulary: Codec, rngs: nnx.Rngs) -> LanguageModel:
    config = LanguageModelConfig(
      vocabulary.vocab_size, **tasks.model_values(self.config)
    )
    return LanguageModel(config, rngs=rngs)

  def loss(
    self, model: LanguageModel, batch: Tokens, rngs: nnx.Rngs | None = None
  ) -> Loss:
    """Computes the cross-entropy of each token given the tokens before it."""
    logits = model(shift_right(batch.tokens, BOS), rngs=rngs)
    return cross_entropy(
      logits, batch.tokens, smoothing=self.config.training.label_smoothing
    )

  def evaluate(self, run: Run, data: Corpus, workdir: Path) -> Evaluation | None:
    """Computes the likelihood of complete pieces, and draws a piano roll of one."""
    nats_of = make_nats_of(run.graphdef, own_copies(run.params))
    options = dict(times=run.vocabulary.times, token_budget=self.config.batches.tokens)
    scores, results, rows = {}, {}, {}
    lines = ["split   pieces    nats a token   without ends   nats a step"]
    for split in [name for name in ("valid", "test") if name in data.splits]:
      pieces = data.splits[split]
      scores[split], nats = likelihood(nats_of, pieces, **options)
      results[split] = dict(
        pieces=len(pieces), tokens=sum(map(len, pieces)), **scores[split]
      )
      nats = [round(x, 3) for x in nats.tolist()]
      rows[split] = [[len(piece), x] for piece, x in zip(pieces, nats, strict=True)]
      nll, without_ends, per_step = scores[split].values()
      lines.append(
        f"{split:8}{len(pieces):6,}{nll:15.4f}{without_ends:15.4f}{per_step:14.3f}"
      )
    if not is_first():
      return None
    picture = draw(
      run, data.splits["valid"][0][:_TOKENS_DRAWN], workdir / "piano_roll.png"
    )
    return Evaluation("\n".join(["", *lines, ""]), results, scores, rows, (picture,))


def sample_pieces(
  graphdef: nnx.GraphDef,
  params: PyTree,
  primes: Sequence[Sequence[int] | np.ndarray],
  *,
  num_tokens: int | Sequence[int],
  seed: int,
  sampling: SamplingParams = UNCHANGED,
) -> list[Int[np.ndarray, "_"]]:
  """Returns each prime with up to `num_tokens` new tokens, fewer if the end token is
  drawn.

  Row i depends on the seed, not on the other rows or their number. The model, a
  `LanguageModel`, decodes all of them in one compiled program with a key-value cache.
  """
  sampling.check()
  limits = np.broadcast_to(num_tokens, len(primes)).astype(np.int32)
  begun = Ragged.of([np.concatenate([[BOS], prime]) for prime in primes])
  # Rounding lengths saves compilations: padding takes slots of the cache, but no
  # position.
  shape = (len(primes), _round_up(int(begun.lengths.max())))
  padded = begun.padded(np.arange(len(primes)), shape, PAD)
  key, sampling = jax.random.key(seed), jax.tree.map(jnp.asarray, sampling)
  max_length = _round_up(int(limits.max()))
  tokens = _draw(graphdef, params, padded, limits, key, sampling, max_length=max_length)
  return [
    np.concatenate([np.asarray(prime, int), row[~np.isin(row, (PAD, EOS))]])
    for prime, row in zip(primes, np.asarray(tokens), strict=True)
  ]


@functools.partial(jax.jit, static_argnames=("graphdef", "max_length"))
def _draw(graphdef, params, primes, limits, key, sampling, *, max_length):
  model = decoding_model(graphdef, params)
  cache = model.init_cache(len(primes), primes.shape[1] + max_length)
  options = dict(
    sampling=sampling, max_length=max_length, eos=EOS, pad=PAD, never=(BOS,)
  )
  return sample(model.decode, cache, primes, limits, key, **options)


def _round_up(length: int) -> int:
  """Rounds up to a power of two, at least 16."""
  return max(16, 1 << (length - 1).bit_length())


# Scores
# -------------------------------------------------------------------------------------------


def likelihood(
  nats_of: Callable[[Int[Array, "B L"]], Float[Array, "B L"]],
  pieces: Sequence[np.ndarray],
  times: Callable[[np.ndarray], np.ndarray],
  *,
  token_budget: int,
) -> tuple[dict[str, float], Float[np.ndarray, "pieces"]]:
  """Computes the negative log-likelihood of complete pieces, summed in float64.

  Returns nats per token, ends included, per token of the music and per time step; and
  the nats of each piece, its end included. `nats_of` is that of `make_nats_of`, and
  `times` the codec's. A batch has at most `token_budget` tokens, padding included, but
  for a longer piece by itself.
  """
  rows = Ragged.of([np.concatenate([piece, [EOS]]) for piece in pieces])
  boundaries = bucket_boundaries(rows.lengths, _NUM_SHAPES, multiple_of=64)
  budget = max(token_budget, boundaries[-1])
  batches = Batches(rows, boundaries=boundaries, budget=budget, seed=None)
  end_nats, of_pieces = 0.0, np.zeros(len(pieces))
  for step in track(
    range(batches.num_per_epoch), batches.num_per_epoch, "batches scored"
  ):
    (tokens,), chosen = batches[step], batches.order(step)
    found = np.asarray(nats_of(tokens), np.float64)
    of_pieces[chosen] = found.sum(axis=1)[: len(chosen)]
    end_nats += found[tokens == EOS].sum()
  nats, num_tokens = float(of_pieces.sum()), sum(map(len, pieces))
  scores = dict(
    nll=nats / (num_tokens + len(pieces)),
    without_ends=(nats - float(end_nats)) / num_tokens,
    per_step=nats / float(sum(times(piece)[-1] for piece in pieces)),
  )
  return scores, of_pieces


def make_nats_of(
  graphdef: nnx.GraphDef, params: PyTree
) -> Callable[..., Float[Array, "B L"]]:
  """Returns `nats_of` for a `LanguageModel`: compiled, without dropout."""

  @jax.jit
  def score(params, tokens):
    return token_nats(nnx.merge(graphdef, params)(shift_right(tokens, BOS)), tokens)

  return functools.partial(score, params)


def token_nats(
  logits: Float[Array, "B L V"], targets: Int[Array, "B L"]
) -> Float[Array, "B L"]:
  """Computes -log P(target) of each token in float32; 0 for padding."""
  nats = optax.softmax_cross_entropy_with_integer_labels(
    logits.astype(jnp.float32), targets
  )
  return jnp.where(targets != PAD, nats, 0.0)
