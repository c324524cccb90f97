"""Sampling: cached as uncached, greedy at the limits, and as often as the model says."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from compiling import quickly, randomly
from flax import nnx

from experiments.data.tokenizer import BOS, EOS, PAD
from experiments.music import sampling as music
from relpos_jax.decoding.sampling import SamplingParams, filter_logits, prefill, sample
from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig
from relpos_jax.models.layers import decoding_model

VOCABULARY, CONTEXT = 11, 16
PRIMES = [[5, 9, 4], [], [6, 6, 7, 8, 9, 10, 3]]
NUM_TOKENS = [9, 4, 8]


@pytest.fixture(scope="module")
def model():
  config = LanguageModelConfig(
    VOCABULARY, num_layers=1, width=16, num_heads=2, feed_forward=16, max_distance=3,
    positions="both", relative_values=False, beyond="zero",
    implementation="skew",  # which does not support decoding
  )  # fmt: skip
  return nnx.split(randomly(lambda: LanguageModel(config, rngs=nnx.Rngs(0)), 0.4))


@pytest.fixture(scope="module")
def sampler(model):
  return functools.partial(music.sample_pieces, *model)


@pytest.fixture(scope="module")
def full_pass(model):
  """Returns a function from rows of tokens to logits, without a cache."""
  graphdef, params = model
  forward = quickly(lambda tokens: nnx.merge(graphdef, params)(tokens))

  def logits(rows) -> np.ndarray:
    padded = np.full((VOCABULARY, CONTEXT), PAD)  # one shape, one compilation
    padded[: len(rows), : len(rows[0])] = rows
    return np.array(forward(padded)[: len(rows), : len(rows[0])], float)

  return logits


def greedy(full_pass, prime, num_tokens) -> list[int]:
  row = [BOS, *prime]
  for _ in range(num_tokens):
    logits = full_pass([row])[0, -1]
    logits[[PAD, BOS]] = -np.inf
    row.append(int(logits.argmax()))
    if row[-1] == EOS:
      return row[1:-1]
  return row[1:]


@pytest.mark.parametrize(
  "values",
  [
    dict(temperature=0.0),
    dict(temperature=1e-6),
    dict(top_k=1),
    dict(top_p=1e-6),
    dict(top_p=0.0),
  ],
)
def test_the_most_probable_token_alone_is_greedy_decoding(full_pass, sampler, values):
  pieces = sampler(
    PRIMES, num_tokens=NUM_TOKENS, seed=3, sampling=SamplingParams(**values)
  )
  for piece, prime, limit in zip(pieces, PRIMES, NUM_TOKENS, strict=True):
    assert piece.tolist() == greedy(full_pass, prime, limit)
  assert len({tuple(piece) for piece in pieces}) == 3


def test_reading_a_prime_in_pieces_equals_reading_it_at_once(model, full_pass):
  """Uses rows that end in different pieces, padded on either side and between."""
  rows = [[PAD, PAD, BOS, 5, PAD, 9, 4, 7, 3], [BOS, 6, 6, 7, PAD, PAD, PAD, PAD, PAD]]

  @quickly
  def read(params, rows):
    decoder = decoding_model(model[0], params)
    return prefill(decoder.decode, decoder.init_cache(2, 9), rows, pad=PAD, piece=2)

  logits, cache = read(model[1], jnp.array(rows))
  for found, row in zip(logits, rows, strict=True):
    wanted = full_pass([[token for token in row if token != PAD]])[0, -1]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
  assert cache.next_position.tolist() == [6, 4] and cache.layers[0].length.tolist() == [
    9,
    9,
  ]


def test_a_row_is_the_same_whatever_its_neighbours_and_depends_on_the_seed(sampler):
  pieces = sampler(PRIMES, num_tokens=9, seed=5)
  others = sampler([PRIMES[0], [3] * 9, []], num_tokens=[9, 2, 7], seed=5)
  assert pieces[0].tolist() == others[0].tolist()
  assert [piece.tolist() for piece in sampler(PRIMES, num_tokens=9, seed=5)] == [
    piece.tolist() for piece in pieces
  ]
  assert (
    len({tuple(sampler(PRIMES, num_tokens=9, seed=seed)[0]) for seed in range(5)}) > 1
  )
  same = sampler([[5]] * 3, num_tokens=9, seed=0)
  assert len({tuple(piece) for piece in same}) > 1


def test_frequencies_are_the_models_probabilities(full_pass, sampler):
  """Applies a chi-square test to pairs of new tokens, without padding and BOS."""
  num_rows, temperature = 4096, 1.7
  sampling = SamplingParams(temperature)
  pieces = sampler([[5]] * num_rows, num_tokens=2, seed=11, sampling=sampling)
  counts = np.zeros((VOCABULARY, VOCABULARY))
  for piece in pieces:
    first, second, *_ = [*piece[1:].tolist(), EOS, EOS]
    counts[first, second] += 1

  def probabilities(rows):
    logits = full_pass(rows)[:, -1] / temperature
    logits[:, [PAD, BOS]] = -np.inf
    return scipy.special.softmax(logits, axis=-1)

  first = probabilities([[BOS, 5]])[0]
  second = probabilities([[BOS, 5, token] for token in range(VOCABULARY)])
  second[EOS] = np.eye(VOCABULARY)[EOS]  # nothing follows EOS
  expected = num_rows * first[:, None] * second
  assert counts[expected == 0].sum() == 0
  seen, wanted = counts[expected > 0], expected[expected > 0]
  assert len(wanted) == 8 * 9 + 1 and wanted.min() > 5
  assert scipy.stats.chisquare(seen, wanted).pvalue > 1e-3


def test_padding_and_begin_are_never_drawn_and_nothing_follows_the_end():
  """Uses a model that prefers padding, then BOS, then EOS."""
  wants = (
    jnp.full(VOCABULARY, 0.0)
    .at[jnp.array([PAD, BOS, EOS])]
    .set(jnp.array([50.0, 40.0, 2.0]))
  )

  def decode(tokens, cache):
    return jnp.broadcast_to(wants, (*tokens.shape, VOCABULARY)), cache

  options = dict(
    sampling=SamplingParams(), max_length=20, eos=EOS, pad=PAD, never=(BOS,)
  )
  prompts, limits = jnp.full((64, 1), BOS), jnp.full(64, 20)
  tokens = sample(decode, (), prompts, limits, jax.random.key(0), **options)
  for row in np.asarray(tokens).tolist():
    length = row.index(EOS) + 1 if EOS in row else len(row)
    assert PAD not in row[:length] and BOS not in row and {*row[length:]} <= {PAD}
  assert (np.asarray(tokens) == EOS).sum() > 48


@pytest.mark.parametrize("others", [0.0, -np.inf, np.nan])
def test_what_is_never_drawn_is_not_drawn_whatever_the_options(others):
  """Traces the options, which are then not checked; the model excludes others, too."""
  wants = jnp.where(jnp.arange(5) < 3, 9.0, others)

  def decode(tokens, cache):
    return jnp.broadcast_to(wants, (*tokens.shape, 5)), cache

  @quickly
  def draw(sampling):
    options = dict(sampling=sampling, max_length=4, eos=4, pad=2, never=(0, 1))
    prompts, limits = jnp.zeros((8, 1), int), jnp.full(8, 4)
    return sample(decode, (), prompts, limits, jax.random.key(0), **options)

  nonsense = (np.inf, np.nan, -1.0)
  for temperature, top_k, top_p in itertools.product(
    (1.0, 0.0, *nonsense), (0, -1, 1), (1.0, 0.0, *nonsense)
  ):
    drawn = np.asarray(draw(SamplingParams(temperature, top_k, top_p)))
    assert not np.isin(drawn, (0, 1)).any()
    if np.isnan(others):  # the model diverged: rows end at once
      assert (drawn == 2).all()
    else:
      assert (drawn[:, 0] > 2).all()


WRONG = {
  "temperature is -1.0; want 0 or more": dict(temperature=-1.0),
  "temperature is nan; want 0 or more": dict(temperature=np.nan),
  "temperature is inf; want 0 or more": dict(temperature=jnp.inf),
  "top_k is 2.5; want an integer": dict(top_k=2.5),
  "top_p is -0.5; want 0 to 1": dict(top_p=np.float32(-0.5)),
  "top_p is 1.5; want 0 to 1": dict(top_p=1.5),
  "top_p is nan; want 0 to 1": dict(top_p=jnp.array(jnp.nan)),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_option_is_named(sampler, message):
  sampling = SamplingParams(**WRONG[message])
  options = dict(sampling=sampling, max_length=1, eos=EOS, pad=PAD)
  decode = lambda tokens, cache: (jnp.zeros((*tokens.shape, 9)), cache)
  start = jnp.full((1, 1), BOS), jnp.ones(1, int), jax.random.key(0)
  for run in (
    lambda: filter_logits(jnp.zeros((1, 4)), sampling),
    lambda: sample(decode, (), *start, **options),
    lambda: sampler(PRIMES, num_tokens=1, seed=0, sampling=sampling),
  ):
    with pytest.raises(ValueError, match=f"^{message}"):
      run()


def test_no_top_k_and_less_are_all_tokens():
  logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
  for top_k in (0, -1):
    assert jnp.isfinite(filter_logits(logits, SamplingParams(top_k=top_k))).all()


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.77, 0.999, 1.0])
def test_top_p_keeps_the_smallest_set_of_that_probability(top_p):
  logits = np.random.default_rng(0).normal(size=(50, 13)).astype(np.float32)
  found = np.isfinite(filter_logits(jnp.asarray(logits), SamplingParams(top_p=top_p)))
  for row, is_kept in zip(
    scipy.special.softmax(logits.astype(float), axis=-1), found, strict=True
  ):
    ordered = np.sort(row)[::-1]
    size = 1 + int(np.sum(np.cumsum(ordered)[:-1] < top_p))
    assert is_kept.sum() == size and row[is_kept].min() >= ordered[size - 1]


def test_top_p_is_of_what_top_k_and_the_temperature_leave():
  logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))

  def keeps(**values) -> int:
    return np.isfinite(filter_logits(logits, SamplingParams(**values))).sum()

  assert keeps(top_p=0.55) == 2
  assert keeps(top_p=0.55, top_k=2) == 1  # 4 / 7 is enough
  assert keeps(top_p=0.55, temperature=0.5) == 2
  assert keeps(top_p=0.52, temperature=0.5) == 1  # 16 / 30 is enough
  assert keeps(top_p=0.55, temperature=100.0) == 3


def test_other_choices_lengths_and_seeds_compile_nothing_new(sampler):
  sampler(PRIMES, num_tokens=9, seed=0)
  size = music._draw._cache_size()
  sampler(
    [[3] * 12, [4], []],
    num_tokens=[3, 15, 2],
    seed=1,
    sampling=SamplingParams(0.5, 3, 0.9),
  )
  assert music._draw._cache_size() == size
