"""How far back a language model looks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from relpos_jax.data.tokenizer import PAD
from relpos_jax.models.cached import decoding_model, prefill
from relpos_jax.typing import Array, Float, Int, PyTree


def attention_reach(
  graphdef: nnx.GraphDef, params: PyTree, tokens: np.ndarray
) -> Float[np.ndarray, "layers L"]:
  """The weights with which the prediction after the last token sees each of L tokens.

  Layer by layer, means over heads; each layer's sum to one.

  Args:
    graphdef, params: a `LanguageModel`, split.
    tokens: [L], begin first.
  """
  return np.asarray(_last_weights(graphdef, params, jnp.asarray(tokens)[None]))


@functools.partial(jax.jit, static_argnums=0)
def _last_weights(
  graphdef: nnx.GraphDef, params: PyTree, tokens: Int[Array, "1 L"]
) -> Float[Array, "layers L"]:
  """What the layers sowed for the last token, read after all the others: never [L, L]."""
  model = decoding_model(graphdef, params)
  before, last = tokens[:, :-1], tokens[:, -1:]
  cache = model.init_cache(*tokens.shape)
  if before.size:
    _, cache = prefill(model.decode, cache, before, pad=PAD)
  model.set_attributes(sow_weights=True, raise_if_not_found=False)
  _, sown = nnx.capture(model.decode, nnx.Intermediate)(last, cache)
  layers = sown["layers"]
  weights = [layers[n]["self_attention"]["weights"][0] for n in range(len(layers))]
  return jnp.stack([jnp.mean(weights_1N1L[0, :, 0], axis=0) for weights_1N1L in weights])


def distance_holding(
  share: float, weights: Float[np.ndarray, "L"], times: Float[np.ndarray, "L"], now: float
) -> float:
  """The distance in time from `now` within which tokens have this share of the weight.

  >>> distance_holding(0.75, np.array([0.25, 0.5, 0.25]), np.array([0.0, 4.0, 8.0]), now=9.0)
  5.0
  """
  distances = now - times
  order = np.argsort(distances, kind="stable")
  held = np.cumsum(weights[order])
  return float(distances[order][min(np.searchsorted(held, share), len(held) - 1)])
