"""The likelihood of pieces equals a float64 oracle's, for any batch size."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from compiling import make_random
from flax import nnx

from experiments.data.tokenizer import BOS, EOS, PAD
from experiments.music import voices
from experiments.music.scores import likelihood, make_nats_function, token_nats
from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig

VOCABULARY = 12
PIECES = [
  np.random.default_rng(n).integers(3, VOCABULARY, 4 * n) for n in (2, 12, 5, 40, 1)
]


@pytest.fixture(scope="module")
def model():
  sizes = dict(num_layers=1, width=8, num_heads=2, feed_forward=8, max_distance=3)
  config = LanguageModelConfig(VOCABULARY, **sizes)
  return make_random(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def oracle(model) -> tuple[np.ndarray, float]:
  """Returns the nats of each piece, and of all ends."""
  rows = [np.r_[BOS, piece, EOS] for piece in PIECES]
  tokens = jnp.array([np.pad(row, (0, 200 - len(row))) for row in rows])
  nats = np.asarray(token_nats(model(tokens[:, :-1]), tokens[:, 1:]), float)
  return nats.sum(axis=1), nats[tokens[:, 1:] == EOS].sum()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_nats_are_those_of_float64(dtype):
  logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7, 300)) * 8, dtype)
  targets = np.random.default_rng(1).integers(0, 5, (3, 7))
  log_probs = scipy.special.log_softmax(np.asarray(logits, float), axis=-1)
  expected = -np.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
  expected[targets == PAD] = 0
  found = token_nats(logits, jnp.asarray(targets))
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_likelihood_is_the_sum_over_pieces(model, oracle):
  of_pieces, end_nats = oracle
  nats = sum(of_pieces)
  nats_of = make_nats_function(*nnx.split(model))
  scores, found = likelihood(nats_of, PIECES, voices.times, token_budget=1)
  np.testing.assert_allclose(found, of_pieces, rtol=1e-5)
  wanted = [nats / 245, (nats - end_nats) / 240, nats / 60]
  np.testing.assert_allclose([*scores.values()], wanted, rtol=1e-5)


def test_many_tokens_are_summed_in_float64():
  pieces = [np.full(1000, 5)] * 2  # in float32, 2**24 + 0.5 equals 2**24

  def nats_of(tokens):
    return np.where(tokens == EOS, 2.0**24, 0.5 * (tokens > 2)).astype(np.float32)

  scores, found = likelihood(nats_of, pieces, voices.times, token_budget=4096)
  assert found.sum() == 2 * 2**24 + 1000
  assert scores["without_ends"] == 0.5
