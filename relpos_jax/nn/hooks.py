"""Relative positions in your own model: an `attention_fn` for Flax's attention layers."""

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from relpos_jax.attention.operator import attention_weights, dot_product_attention
from relpos_jax.attention.relations import RelativePositions
from relpos_jax.attention.validation import as_array, check_32_bits
from relpos_jax.nn.positions import RelativePositionTables
from relpos_jax.typing import Array, ArrayLike, Float


class RelativeAttention(nnx.Module):
  """The `attention_fn` of an `nnx.MultiHeadAttention` with relative positions.

  It owns the tables, parameters `attention_fn/tables/key` and `attention_fn/tables/value` of the
  layer it is given to. Layers given the same object share its tables.

  If there are as many queries as keys, both have positions 0, 1, 2, ..., or the `input_positions`
  that the layer is called with (flax 0.12.12). In cached decoding there is one query, flax does not
  report its position, and the call raises unless it is given: as `input_positions`, or by
  `nnx.view(model, query_positions=...)`, which works for complete models and with every flax. The
  key in slot j of the cache then has position j, unless `key_positions` are given in the same way.

  Unlike flax, dropout draws each weight independently and ignores `broadcast_dropout`, softmax is
  computed in float32 or wider, and a query that sees no key gets zero. `precision` must be None:
  set `jax.default_matmul_precision` instead.

  Args:
    max_distance: k, the distance at which positions are clipped.
    head_width: H, the layer's `qkv_features / num_heads`.
    implementation: of the operator; None takes the fastest that supports the call.
    options: of `RelativePositionTables`: num_heads, keys, values, beyond.

  Raises, when called:
    ValueError: positions are needed, or an argument does not fit.
    NotImplementedError: `precision` is given.

  >>> rngs = nnx.Rngs(0)
  >>> relative = RelativeAttention(16, head_width=8, rngs=rngs)
  >>> layer = nnx.MultiHeadAttention(4, 32, attention_fn=relative, decode=False, rngs=rngs)
  >>> layer(jnp.ones((2, 5, 32)), is_causal=True).shape
  (2, 5, 32)

  Decodes token by token:

  >>> layer.init_cache((2, 5, 32))
  >>> for t in range(5):
  ...   step = nnx.view(layer, decode=True, query_positions=jnp.array([t]))
  ...   y = step(jnp.ones((2, 1, 32)))
  """

  def __init__(
    self,
    max_distance: int,
    head_width: int,
    *,
    implementation: str | None = None,
    rngs: nnx.Rngs,
    **options,
  ):
    self.tables = RelativePositionTables(max_distance, head_width, rngs=rngs, **options)
    self.implementation = implementation
    self.query_positions = nnx.data(None)
    self.key_positions = nnx.data(None)

  def set_view(
    self, query_positions: ArrayLike | None = None, key_positions: ArrayLike | None = None
  ) -> None:
    """Sets positions for `nnx.view`: integers `[B, T]` or `[T]`, and `[B, S]` or `[S]`."""
    if query_positions is not None:
      self.query_positions = as_array("query_positions", query_positions)
    if key_positions is not None:
      self.key_positions = as_array("key_positions", key_positions)

  def __call__(
    self,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K H"],
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: object = None,
    module: nnx.Module | None = None,
    is_causal: bool = False,
    input_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
  ) -> Float[Array, "*B T N H"]:
    """Attends as `nnx.dot_product_attention` does; bias and mask broadcast to [*B, N, T, S].

    If `module` is given, sows the weights before dropout as its `attention_weights`.
    """
    refuse(precision=precision)
    return attend_as_flax(
      self.tables(),
      query,
      key,
      value,
      bias,
      mask,
      is_causal=is_causal,
      query_positions=self.query_positions if input_positions is None else input_positions,
      key_positions=self.key_positions if key_positions is None else key_positions,
      dropout_rng=None if deterministic else dropout_rng,
      dropout_rate=0.0 if deterministic else dropout_rate,
      dtype=dtype,
      sow=None if module is None else functools.partial(module.sow, nnx.Intermediate),
      implementation=self.implementation,
    )


def refuse(**settings: object) -> None:
  """Raises NotImplementedError for settings of flax that the operator does not have."""
  for name, setting in settings.items():
    if setting is not None:
      raise NotImplementedError(f"{name} is {setting!r:.60}; RelativeAttention wants None")


def attend_as_flax(
  relations: RelativePositions,
  query: Float[Array, "*B T N H"],
  key: Float[Array, "*B S K H"],
  value: Float[Array, "*B S K H"],
  bias: ArrayLike | None,
  mask: ArrayLike | None,
  *,
  is_causal: bool,
  query_positions: ArrayLike | None,
  key_positions: ArrayLike | None,
  dropout_rng: Array | None,
  dropout_rate: float,
  dtype: DTypeLike | None,
  sow: Callable | None,
  implementation: str | None,
) -> Float[Array, "*B T N H"]:
  """Calls the operator with flax's arguments: any batch axes, numbers as masks, a `dtype`."""
  *batch, num_queries, _, _ = query.shape
  num_keys = key.shape[-3]
  dtype = jnp.result_type(query, key, value) if dtype is None else dtype
  size = math.prod(batch)
  q, k, v = (x.astype(dtype).reshape(size, *x.shape[-3:]) for x in (query, key, value))
  queries, keys = _positions(query_positions, key_positions, num_queries, num_keys)
  options = dict(
    bias=_like_logits(bias, batch),
    mask=None if mask is None else _like_logits(mask, batch) != 0,
    relations=relations,
    is_causal=is_causal,
    query_positions=_merged(queries, batch, rank=1),
    key_positions=_merged(keys, batch, rank=1),
  )
  if sow is not None:
    weights = attention_weights(q, k, **options).astype(dtype)
    sow("attention_weights", weights.reshape(*batch, *weights.shape[1:]))
  options |= dict(dropout_rate=dropout_rate, dropout_key=dropout_rng)
  z = dot_product_attention(q, k, v, **options, implementation=implementation)
  return z.reshape(query.shape)


def _positions(
  query_positions: ArrayLike | None,
  key_positions: ArrayLike | None,
  num_queries: int,
  num_keys: int,
) -> tuple[ArrayLike | None, ArrayLike | None]:
  """Returns positions of queries and keys; as many keys as queries have the queries' positions."""
  for name, positions in (("query_positions", query_positions), ("key_positions", key_positions)):
    check_32_bits(name, positions)
  if query_positions is None and num_queries != num_keys:
    raise ValueError(
      f"query has {num_queries} tokens, key {num_keys}, and the query's positions are unknown "
      "(flax does not pass them in decoding): give query_positions by nnx.view, or input_positions"
    )
  if key_positions is None and num_queries == num_keys:
    return query_positions, query_positions
  return query_positions, key_positions


def _like_logits(x: ArrayLike | None, batch: list[int]) -> Array | None:
  """Reshapes a bias or mask that broadcasts to [*B, N, T, S] to [B or 1, #N, #T, #S]."""
  if x is None:
    return None
  x = jnp.asarray(x)
  x = _merged(x.reshape(*[1] * (3 - x.ndim), *x.shape), batch, rank=3)
  return x if x.ndim == 4 else x[None]


def _merged(x: ArrayLike | None, batch: list[int], rank: int) -> Array | None:
  """Merges batch axes before the last `rank` axes into one; drops them if all have size 1."""
  if x is None:
    return None
  x = jnp.asarray(x)
  own = x.shape[: x.ndim - rank]
  same, rest = math.prod(own) == 1, x.shape[len(own) :]
  if len(batch) > 1 and not same:
    x = jnp.broadcast_to(x, (*batch, *rest))
  return x.reshape(rest) if same else x.reshape(math.prod(x.shape[: x.ndim - rank]), *rest)
