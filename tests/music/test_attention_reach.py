"""The reach of attention: the model's own weights, and the time that holds a share of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx

from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig
from relpos_jax.music.attention_reach import _last_weights, attention_reach, distance_holding

TOKENS = np.array([1, 5, 7, 3, 5, 8])


def test_weights_are_those_of_the_last_token_layer_by_layer():
  config = LanguageModelConfig(
    9, num_layers=2, width=8, num_heads=2, feed_forward=8, max_distance=2, relative_values=False
  )
  graphdef, params = nnx.split(jax.jit(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))())
  weights = attention_reach(graphdef, params, TOKENS)
  assert weights.shape == (2, 6)
  np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)

  @jax.jit
  def projected(params):
    model = nnx.merge(graphdef, params)
    layer = model.layers[0]
    x = layer.residuals[0].before(model.softmax(jnp.asarray(TOKENS)[None]))
    attention = layer.self_attention
    return attention.query(x), attention.key(x), attention.tables().key

  query, key, table = projected(params)
  table = np.asarray(table, float)[[0, 0, 0, 0, 1, 2]]
  logits = np.einsum("nh,snh->ns", query[0, -1], key[0] + table) / 2
  np.testing.assert_allclose(weights[0], scipy.special.softmax(logits, -1).mean(0), rtol=1e-4)


def test_memory_grows_with_the_length_and_not_with_its_square():
  """Weights of all tokens on all are never there, in any layer; compiled, not run."""
  config = LanguageModelConfig(9, num_layers=2, width=8, num_heads=2, feed_forward=8)
  graphdef, params = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))
  tokens = jax.ShapeDtypeStruct((1, 8192), jnp.int32)
  compiled = _last_weights.lower(graphdef, params, tokens).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 2 * 8192**2 * 4 / 8


@pytest.mark.parametrize(
  "share, distance", [(0.1, 1), (0.3, 1), (0.31, 3), (0.8, 3), (0.81, 9), (1.0, 9)]
)
def test_the_distance_holds_the_share(share, distance):
  weights, times = np.array([0.2, 0.5, 0.2, 0.1]), np.array([0.0, 6.0, 8.0, 8.0])
  assert distance_holding(share, weights, times, now=9.0) == distance
