"""Decoding with a cache: the model that does it, and how it reads what is there already."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from relpos_jax.typing import Array, Float, Int, PyTree

Decode = Callable[[Int[Array, "B M"], PyTree], tuple[Float[Array, "B M V"], PyTree]]

_PIECE = 128


def decoding_model(graphdef: nnx.GraphDef, params: PyTree) -> nnx.Module:
  """The model, put together, whose attention takes the fastest implementation of all that can.

  A decoder reads one token against a cache, at positions of its own: what a config names, as what
  is fastest in training (`implementation="skew"`), may not do that.
  """
  model = nnx.merge(graphdef, params)
  model.set_attributes(implementation=None, raise_if_not_found=False)
  return model


def prefill(
  decode: Decode, cache: PyTree, tokens: Int[Array, "B P"], *, pad: int, piece: int = _PIECE
) -> tuple[Float[Array, "B V"], PyTree]:
  """Reads rows of tokens: the logits after the last of each, and the cache.

  What one reading at once would give, `piece` tokens at a time: so the weights held are
  [B, N, piece, S], and memory grows with the length, not with its square.

  Args:
    decode: from M more tokens and the cache to the logits after each, and the new cache. `pad`
      among them is no token.
    cache: may have read something.
    tokens: filled with `pad`, anywhere; at least one token a row.

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
