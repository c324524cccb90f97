"""Models that decode with a key-value cache."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from relpos_jax.typing import Array, Float, Int, PyTree

Decode = Callable[[Int[Array, "B M"], PyTree], tuple[Float[Array, "B M V"], PyTree]]

_PIECE = 128


def decoding_model(graphdef: nnx.GraphDef, params: PyTree) -> nnx.Module:
  """Merges a model for decoding and resets the implementation of its attention layers.

  A decoder reads one token against a cache, at given positions, which the implementation that a
  config names for training, such as "skew", may not support.
  """
  model = nnx.merge(graphdef, params)
  model.set_attributes(implementation=None, raise_if_not_found=False)
  return model


def prefill(
  decode: Decode, cache: PyTree, tokens: Int[Array, "B P"], *, pad: int, piece: int = _PIECE
) -> tuple[Float[Array, "B V"], PyTree]:
  """Reads rows of tokens and returns the logits after the last of each, and the cache.

  Reads `piece` tokens at a time, so that weights are [B, N, piece, S] and memory grows with the
  length, not with its square. The result is the same as reading all at once.

  Args:
    decode: maps M more tokens and the cache to the logits after each, and the new cache. `pad`
      among them is no token.
    cache: may have read tokens already.
    tokens: with `pad` anywhere; at least one token in each row.

  >>> count = lambda tokens, cache: (jax.nn.one_hot(tokens + 1, 9), cache + tokens.shape[1])
  >>> logits, cache = prefill(count, 0, jnp.array([[3, 4, 5, 6, 7], [5, 6, 0, 0, 0]]), pad=0)
  >>> logits.argmax(-1).tolist(), int(cache)
  ([8, 7], 5)
  """

  def read(state, tokens):
    logits, cache = state
    after, cache = decode(tokens, cache)
    is_token = tokens != pad
    last = tokens.shape[1] - 1 - jnp.argmax(is_token[:, ::-1], axis=1)
    after = jnp.take_along_axis(after, last[:, None, None], axis=1)[:, 0]
    return (jnp.where(is_token.any(axis=1, keepdims=True), after, logits), cache), None

  first = (tokens.shape[1] - 1) % piece + 1
  state, _ = read((0.0, cache), tokens[:, :first])
  if first == tokens.shape[1]:
    return state
  pieces = tokens[:, first:].reshape(len(tokens), -1, piece)
  return jax.lax.scan(read, state, pieces.swapaxes(0, 1))[0]
