"""Sampling: cached as uncached, greedy at the limits, by the model's probabilities."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from compiling import compile_quickly, make_random
from flax import nnx

from experiments.data.tokenizer import BOS, EOS, PAD
from experiments.music import sampling as music
from relpos_jax.decoding.sampling import SamplingParams, filter_logits, prefill, sample
from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig
from relpos_jax.models.layers import decoding_model

VOCABULARY, CONTEXT = 11, 16
PRIMES = [[5, 9, 4], [], [6, 6, 7, 8, 9, 10, 3]]
NUM_TOKENS = [9, 4, 8]
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def model():
  config = LanguageModelConfig(
    VOCABULARY,
    num_layers=1,
    width=16,
    num_heads=2,
    feed_forward=16,
    max_distance=3,
    positions="both",
    relative_values=False,
    beyond="zero",
    implementation="skew",  # which does not support decoding
  )
  return nnx.split(make_random(lambda: LanguageModel(config, rngs=nnx.Rngs(0)), 0.4))


@pytest.fixture(scope="module")
def sampler(model):
  """Returns a function from prompts to pieces as lists."""

  def sample(prompts, **options):
    pieces = music.sample_pieces(*model, prompts, **options)
    return [piece.tolist() for piece in pieces]

  return sample


@pytest.fixture(scope="module")
def full_pass(model):
  """Returns a function from rows of tokens to logits, without a cache."""
  graphdef, params = model
  forward = compile_quickly(lambda tokens: nnx.merge(graphdef, params)(tokens))

  def logits(rows) -> np.ndarray:
    padded = np.full((VOCABULARY, CONTEXT), PAD)  # one shape, one compilation
    padded[: len(rows), : len(rows[0])] = rows
    return np.array(forward(padded)[: len(rows), : len(rows[0])], float)

  return logits


def decode_greedily(full_pass, prompt, num_tokens) -> list[int]:
  row = [BOS, *prompt]
  for _ in range(num_tokens):
    logits = full_pass([row])[0, -1]
    logits[[PAD, BOS]] = -np.inf
    row.append(int(logits.argmax()))
    if row[-1] == EOS:
      return row[1:-1]
  return row[1:]


@pytest.mark.parametrize(
  "sampling",
  [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1e-6),
    SamplingParams(top_k=1),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=0.0),
  ],
  ids=str,
)
def test_the_most_probable_token_alone_is_greedy_decoding(full_pass, sampler, sampling):
  pieces = sampler(PRIMES, num_tokens=NUM_TOKENS, seed=3, sampling=sampling)
  for piece, prompt, limit in zip(pieces, PRIMES, NUM_TOKENS, strict=True):
    assert piece == decode_greedily(full_pass, prompt, limit)
  assert len({*map(tuple, pieces)}) == 3


def test_reading_a_prompt_in_pieces_equals_reading_it_at_once(model, full_pass):
  """Uses rows that end in different pieces, padded on either side and between."""
  graphdef, params = model
  rows = [[PAD, PAD, BOS, 5, PAD, 9, 4, 7, 3], [BOS, 6, 6, 7, PAD, PAD, PAD, PAD, PAD]]

  @compile_quickly
  def read(params, rows):
    decoder = decoding_model(graphdef, params)
    return prefill(decoder.decode, decoder.init_cache(2, 9), rows, pad=PAD, piece=2)

  logits, cache = read(params, jnp.array(rows))
  for actual, row in zip(logits, rows, strict=True):
    tokens = [token for token in row if token != PAD]
    wanted = full_pass([tokens])[0, -1]
    np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-4)
  assert cache.next_position.tolist() == [6, 4]
  assert cache.layers[0].length.tolist() == [9, 9]


def test_a_row_is_the_same_whatever_its_neighbours(sampler):
  pieces = sampler(PRIMES, num_tokens=9, seed=5)
  others = sampler([PRIMES[0], [3] * 9, []], num_tokens=[9, 2, 7], seed=5)
  assert pieces[0] == others[0]
  assert sampler(PRIMES, num_tokens=9, seed=5) == pieces


def test_a_row_depends_on_the_seed_and_its_place(sampler):
  firsts = [sampler(PRIMES, num_tokens=9, seed=seed)[0] for seed in range(5)]
  assert len({*map(tuple, firsts)}) > 1
  same_prompts = sampler([[5]] * 3, num_tokens=9, seed=0)
  assert len({*map(tuple, same_prompts)}) > 1


def test_frequencies_are_the_models_probabilities():
  """Applies a chi-square test to pairs of new tokens, each drawn by the one before."""
  num_rows, temperature, pad = 4096, 1.7, 4
  logits_of_next = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)

  def decode(tokens, cache):
    return jnp.asarray(logits_of_next)[tokens], cache

  prompts, limits = jnp.zeros((num_rows, 1), int), jnp.full(num_rows, 2)
  options = {"max_length": 2, "eos": 9, "pad": pad}  # no token is 9
  sampling = SamplingParams(temperature)
  tokens = sample(decode, (), prompts, limits, KEY, sampling=sampling, **options)
  counts = np.zeros((pad, pad))
  np.add.at(counts, tuple(np.asarray(tokens).T), 1)
  share = scipy.special.softmax(logits_of_next[:pad, :pad] / temperature, axis=-1)
  expected = num_rows * share[0][:, None] * share
  assert scipy.stats.chisquare(counts.ravel(), expected.ravel()).pvalue > 1e-3


def constant_decoder(logits):
  """Returns a `decode` whose model always wants the same."""

  def decode(tokens, cache):
    return jnp.broadcast_to(logits, (*tokens.shape, len(logits))), cache

  return decode


def test_padding_and_begin_are_never_drawn_and_nothing_follows_the_end():
  """Uses a model that prefers padding, then BOS, then EOS."""
  logits = np.zeros(VOCABULARY)
  logits[[PAD, BOS, EOS]] = 50, 40, 2
  options = {"max_length": 20, "eos": EOS, "pad": PAD, "never": (BOS,)}
  prompts, limits = jnp.full((64, 1), BOS), jnp.full(64, 20)
  arguments = constant_decoder(jnp.float32(logits)), (), prompts, limits, KEY
  tokens = np.asarray(sample(*arguments, sampling=SamplingParams(), **options))
  has_ended = np.cumsum(tokens == EOS, axis=1) > 0
  is_after_end = np.pad(has_ended, [(0, 0), (1, 0)])[:, :-1]
  assert BOS not in tokens
  np.testing.assert_array_equal(tokens == PAD, is_after_end)
  assert (tokens == EOS).sum() > 48


TEMPERATURES = 1.0, 0.0, np.inf, np.nan, -1.0


def test_what_is_never_drawn_is_not_drawn_whatever_the_options():
  """Traces the options, which are then not checked; the model excludes others, too."""

  @compile_quickly
  def draw(sampling, others):
    decode = constant_decoder(jnp.where(jnp.arange(5) < 3, 9.0, others))
    prompts, limits = jnp.zeros((8, 1), int), jnp.full(8, 4)
    options = {"max_length": 4, "eos": 4, "pad": 2, "never": (0, 1)}
    return sample(decode, (), prompts, limits, KEY, sampling=sampling, **options)

  options = itertools.product(TEMPERATURES, (0, -1, 1), TEMPERATURES)
  for values, others in itertools.product(options, (0.0, -np.inf, np.nan)):
    drawn = np.asarray(draw(SamplingParams(*values), others))
    assert not np.isin(drawn, (0, 1)).any()
    if np.isnan(others):  # the model diverged: rows end at once
      assert (drawn == 2).all()
    else:
      assert (drawn[:, 0] > 2).all()


@pytest.mark.parametrize(
  "option, value, message",
  [
    ("temperature", -1.0, "temperature is -1.0; want 0 or more"),
    ("temperature", np.nan, "temperature is nan; want 0 or more"),
    ("temperature", jnp.inf, "temperature is inf; want 0 or more"),
    ("top_k", 2.5, "top_k is 2.5; want an integer"),
    ("top_p", np.float32(-0.5), "top_p is -0.5; want 0 to 1"),
    ("top_p", 1.5, "top_p is 1.5; want 0 to 1"),
    ("top_p", np.array(np.nan), "top_p is nan; want 0 to 1"),
  ],
)
def test_a_wrong_option_is_named(sampler, option, value, message):
  sampling = SamplingParams(**{option: value})
  start = jnp.full((1, 1), BOS), jnp.ones(1, int), KEY
  options = {"sampling": sampling, "max_length": 1, "eos": EOS, "pad": PAD}
  with pytest.raises(ValueError, match=f"^{message}"):
    sample(constant_decoder(jnp.zeros(9)), (), *start, **options)
  with pytest.raises(ValueError, match=f"^{message}"):
    sampler(PRIMES, num_tokens=1, seed=0, sampling=sampling)


FOUR = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.77, 0.999, 1.0])
def test_top_p_keeps_the_smallest_set_of_that_probability(top_p):
  logits = np.random.default_rng(0).normal(size=(50, 13)).astype(np.float32)
  filtered = filter_logits(jnp.asarray(logits), SamplingParams(top_p=top_p))
  probabilities = scipy.special.softmax(logits.astype(float), axis=-1)
  for row, is_kept in zip(probabilities, np.isfinite(filtered), strict=True):
    ordered = np.sort(row)[::-1]
    size = 1 + int(np.sum(np.cumsum(ordered)[:-1] < top_p))
    assert is_kept.sum() == size
    assert row[is_kept].min() >= ordered[size - 1]


@pytest.mark.parametrize(
  "values, num_kept",
  [
    ({"top_k": 0}, 4),
    ({"top_k": -1}, 4),
    ({"top_p": 0.55}, 2),
    ({"top_p": 0.55, "top_k": 2}, 1),  # 4 / 7 is enough
    ({"top_p": 0.55, "temperature": 0.5}, 2),
    ({"top_p": 0.52, "temperature": 0.5}, 1),  # 16 / 30 is enough
    ({"top_p": 0.55, "temperature": 100.0}, 3),
  ],
  ids=str,
)
def test_top_p_is_of_what_top_k_and_the_temperature_keep(values, num_kept):
  filtered = filter_logits(FOUR, SamplingParams(**values))
  assert np.isfinite(filtered).sum() == num_kept


def test_other_choices_lengths_and_seeds_compile_nothing_new(sampler):
  sampler(PRIMES, num_tokens=9, seed=0)
  options = {"num_tokens": [3, 15, 2], "sampling": SamplingParams(0.5, 3, 0.9)}
  with jax.no_tracing():
    sampler([[3] * 12, [4], []], seed=1, **options)


def test_a_token_beyond_the_vocabulary_excludes_no_other():
  def always_last(tokens, cache):
    return 9.0 * jax.nn.one_hot(jnp.full(tokens.shape, 4), 5), cache

  found = sample(
    always_last,
    (),
    jnp.array([[1]]),
    jnp.array([2]),
    jax.random.key(0),
    sampling=SamplingParams(temperature=0.0),
    max_length=2,
    eos=0,
    pad=-1,
    never=(-1, 6),
  )
  assert found.tolist() == [[4, 4]]
