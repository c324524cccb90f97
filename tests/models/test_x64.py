"""Models train and decode with 64-bit types enabled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import make_random
from flax import nnx

from relpos_jax.decoding import SamplingParams, beam_search, sample
from relpos_jax.models import LanguageModel, LanguageModelConfig
from relpos_jax.nn.feed_forward import drop

TOKENS = jnp.array([[4, 5, 6], [7, 8, 9]])


@pytest.fixture(autouse=True)
def x64():
  with jax.enable_x64(True):
    yield


@pytest.fixture
def model():
  config = LanguageModelConfig(12, num_layers=1, width=8, num_heads=2, feed_forward=8)
  return make_random(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))


def test_a_training_step_has_finite_gradients(model):
  def loss(model):
    return model(TOKENS, rngs=nnx.Rngs(dropout=0)).sum()

  for gradient in jax.tree.leaves(nnx.grad(loss)(model)):
    assert jnp.isfinite(gradient).all()


def test_the_same_numbers_are_dropped():
  def drop_ones():
    return drop(jnp.ones((4, 2), jnp.float32), 0.5, nnx.Rngs(dropout=1))

  with jax.enable_x64(False):
    wanted = drop_ones()
  np.testing.assert_array_equal(drop_ones(), wanted)


def test_decoding_in_a_loop_equals_the_full_pass(model):
  def step(cache, tokens):
    logits, cache = model.decode(tokens[:, None], cache)
    return cache, logits[:, 0]

  _, logits = jax.lax.scan(step, model.init_cache(2, 3), TOKENS.T)
  np.testing.assert_allclose(logits.swapaxes(0, 1), model(TOKENS), atol=1e-5)


def test_beam_search_finds_what_greedy_sampling_draws(model):
  def decode(tokens, cache):
    return model.decode(tokens, cache)

  options = dict(max_length=4, eos=11, pad=0)
  limits = jnp.array([4, 3])
  tokens, _ = beam_search(
    decode,
    model.init_cache(2, 5),
    lambda cache, _: cache,  # of one hypothesis
    beam_size=1,
    length_limits=limits,
    bos=1,
    **options,
  )
  greedy = SamplingParams(temperature=0.0)
  prompts = jnp.array([[1], [1]])
  drawn = sample(
    decode,
    model.init_cache(2, 5),
    prompts,
    limits,
    jax.random.key(0),
    sampling=greedy,
    **options,
  )
  np.testing.assert_array_equal(tokens[:, 0], drawn)
