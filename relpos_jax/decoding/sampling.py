"""Sampling, for any step-wise decoder with a cache."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from relpos_jax.typing import Array, ArrayLike, Bool, Float, Int, Key, PyTree

# Maps M more tokens [B, M] and the cache to the logits after each token [B, M, V] and
# the new cache.
Decode = Callable[[Array, PyTree], tuple[Array, PyTree]]


class SamplingParams(NamedTuple):
  """Holds the options of sampling, in the order in which they apply.

  Attributes:
    temperature: divides the logits. 0 takes the most probable token.
    top_k: keeps the k most probable tokens. 0 or less keeps all.
    top_p: then keeps the most probable tokens until their probabilities add up to it
      (Holtzman et al. 2020, section 3.1). 1 keeps all, 0 the most probable token.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0

  def check(self) -> None:
    """Raises ValueError for options out of range, if they are not traced."""
    temperature, top_k, top_p = self
    if not jnp.issubdtype(jnp.result_type(top_k), jnp.integer):
      raise ValueError(f"top_k is {top_k}; want an integer")
    if _is_known(temperature) and not 0 <= float(temperature) < math.inf:
      raise ValueError(f"temperature is {temperature}; want 0 or more, and finite")
    if _is_known(top_p) and not 0 <= float(top_p) <= 1:
      raise ValueError(f"top_p is {top_p}; want 0 to 1")


UNCHANGED = SamplingParams()


def sample(
  decode: Decode,
  cache: PyTree,
  prompts: Int[Array, "B P"],
  limits: Int[Array, " B"],
  key: Key[Array, ""],
  *,
  sampling: SamplingParams,
  max_length: int,
  eos: int,
  pad: int,
  never: Sequence[int] = (),
) -> Int[Array, "B L"]:
  """Samples a continuation of each prompt, token by token.

  The n-th new token of row i is drawn with `key` folded with i and n, so that rows are
  independent.

  Args:
    decode: maps more tokens [B, M] and the cache to the logits after each token [B, M,
      V] and the new cache. It must ignore `pad`, which is in prompts and after rows
      have ended.
    cache: an empty cache, with room for P + L tokens in each row.
    prompts: tokens, padded with `pad` on either side, at least one in each row.
    limits: the maximum number of new tokens in each row, counting `eos`; at most L.
    key: a key from `jax.random.key`.
    sampling: the options. If they are traced, changing them does not recompile.
    max_length: L, the static length of the result.
    eos: the token that ends a row.
    pad: the token after `eos` in the result.
    never: tokens that are never drawn.

  A row also ends if the logits are NaN.

  >>> def count(tokens, cache):  # 3, 4, 5, ... and then 0, which is eos
  ...   return 9.0 * jax.nn.one_hot((tokens + 1) % 6, 7), cache
  >>> prompts, limits = jnp.array([[1, 2], [3, 6]]), jnp.array([2, 4])
  >>> greedy = SamplingParams(temperature=0.0)
  >>> options = dict(sampling=greedy, max_length=4, eos=0, pad=6)
  >>> sample(count, (), prompts, limits, jax.random.key(0), **options).tolist()
  [[3, 4, 6, 6], [4, 5, 0, 6]]
  """
  rows = jnp.arange(len(prompts))
  keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows)
  banned = jnp.array([*never, pad])

  def advance(state: _State) -> _State:
    is_broken = jnp.isnan(state.logits).any(-1)  # the model has diverged
    is_live = state.is_live & ~is_broken
    latest = _draw(state, keys, banned, sampling)
    latest = jnp.where(is_live, latest, pad)
    tokens = state.tokens.at[:, state.step].set(latest)
    step = state.step + 1
    is_live &= latest != eos
    is_live &= step < limits
    logits, cache = decode(latest[:, None], state.cache)
    return _State(step, tokens, is_live, logits[:, 0], cache)

  def goes_on(state: _State) -> Array:
    return jnp.any(state.is_live) & (state.step < max_length)

  logits, cache = prefill(decode, cache, prompts, pad=pad)
  tokens = jnp.full((len(prompts), max_length), pad, prompts.dtype)
  first = _State(jnp.int32(0), tokens, limits > 0, logits, cache)
  return jax.lax.while_loop(goes_on, advance, first).tokens


class _State(NamedTuple):
  """Holds the state of the loop in `sample`, between two steps."""

  step: Int[Array, ""]  # the number of steps so far; each draws a token in every row
  tokens: Int[Array, "B L"]  # the new tokens so far, then padding
  is_live: Bool[Array, " B"]  # whether the row has not ended
  logits: Float[Array, "B V"]  # of the next token
  cache: PyTree


def _draw(
  state: _State, keys: Key[Array, " B"], banned: Array, sampling: SamplingParams
) -> Int[Array, " B"]:
  """Draws the next token of each row, or takes the best at temperature 0."""
  # If all other tokens have -inf, they must still be above the banned tokens.
  lowest = jnp.finfo(jnp.float32).min
  logits = state.logits.astype(jnp.float32)
  logits = jnp.nan_to_num(logits, nan=lowest)
  # A negative number must not count from the end of the vocabulary.
  excluded = logits.at[:, banned]
  logits = excluded.set(-jnp.inf, mode="drop", wrap_negative_indices=False)
  keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, state.step)
  filtered = filter_logits(logits, sampling)
  drawn = jax.vmap(jax.random.categorical)(keys, filtered)
  most_probable = jnp.argmax(logits, axis=-1)
  return jnp.where(sampling.temperature > 0, drawn, most_probable)


def prefill(
  decode: Decode,
  cache: PyTree,
  tokens: Int[Array, "B P"],
  *,
  pad: int,
  piece: int = 128,
) -> tuple[Float[Array, "B V"], PyTree]:
  """Reads rows of tokens; returns the logits after the last token, and the cache.

  It reads `piece` tokens at a time. So weights are [B, N, piece, S], and memory grows
  with the length instead of its square. Reading all tokens at once would give the same
  result. `pad` may be anywhere, but each row needs a token. The cache may already have
  tokens.

  >>> def count(tokens, cache):
  ...   return jax.nn.one_hot(tokens + 1, 9), cache + tokens.shape[1]
  >>> prompts = jnp.array([[3, 4, 5, 6, 7], [5, 6, 0, 0, 0]])
  >>> logits, cache = prefill(count, 0, prompts, pad=0)
  >>> logits.argmax(-1).tolist(), int(cache)
  ([8, 7], 5)
  """

  def read(state, tokens):
    before, cache = state
    logits, cache = decode(tokens, cache)
    is_token = tokens != pad
    columns = jnp.arange(tokens.shape[1])
    last = jnp.max(jnp.where(is_token, columns, 0), axis=1)
    logits = jax.vmap(operator.getitem)(logits, last)
    has_token = is_token.any(axis=1, keepdims=True)
    logits = jnp.where(has_token, logits, before)
    return (logits, cache), None

  num_rows, length = tokens.shape
  first = (length - 1) % piece + 1
  first_piece, rest = jnp.split(tokens, [first], axis=1)
  state, _ = read((0.0, cache), first_piece)
  if first < length:
    pieces = rest.reshape(num_rows, -1, piece).swapaxes(0, 1)
    state, _ = jax.lax.scan(read, state, pieces)
  return state


def filter_logits(
  logits: Float[Array, "B V"], sampling: SamplingParams
) -> Float[Array, "B V"]:
  """Divides logits by the temperature, and sets excluded tokens to -inf.

  Raises ValueError for options out of range.

  >>> logits = jnp.log(jnp.array([[0.1, 0.5, 0.1, 0.3]]))
  >>> jnp.isfinite(filter_logits(logits, SamplingParams(top_k=1))).tolist()
  [[False, True, False, False]]
  >>> jnp.isfinite(filter_logits(logits, SamplingParams(top_p=0.7))).tolist()
  [[False, True, False, True]]
  """
  sampling.check()
  temperature, top_k, top_p = sampling
  # The largest logit becomes 0: divided by a tiny temperature, it does not overflow.
  logits = logits - jnp.max(logits, axis=-1, keepdims=True)
  # An infinite temperature would make NaN of -inf.
  finite = jnp.minimum(temperature, 1e30)
  divisor = jnp.where(temperature > 0, finite, 1.0)
  logits /= divisor
  order = jnp.argsort(logits, axis=-1, descending=True)
  ranked = jnp.take_along_axis(logits, order, axis=-1)
  rank = jnp.arange(logits.shape[-1])
  stays = (rank < top_k) | (top_k <= 0)
  ranked = jnp.where(stays, ranked, -jnp.inf)
  probabilities = jax.nn.softmax(ranked)
  before = jnp.cumsum(probabilities, axis=-1) - probabilities
  is_first = rank == 0
  stays &= (before < top_p) | (top_p >= 1) | is_first
  ranks = jnp.argsort(order, axis=-1)
  stays = jnp.take_along_axis(stays, ranks, axis=-1)
  return jnp.where(stays, logits, -jnp.inf)


def _is_known(x: ArrayLike) -> bool:
  return not isinstance(x, Tracer)
