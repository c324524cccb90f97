"""Relative positions in your own model, as an `attention_fn` of Flax's layers."""

import math
from collections.abc import Callable
from typing import Any, Protocol, Unpack, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.dtypes import promote_dtype
from jax.typing import DTypeLike

from relpos_jax.attention.arrays import as_array
from relpos_jax.attention.operator import attention_weights, dot_product_attention
from relpos_jax.nn.positions import Positions, RelativePositionTables, TableOptions
from relpos_jax.typing import Array, ArrayLike, Float


class RelativeAttention(nnx.Module):
  """The `attention_fn` of an `nnx.MultiHeadAttention` with relative positions.

  It owns the tables, parameters `attention_fn/tables/key` and
  `attention_fn/tables/value` of the layer it is given to. Layers given the same object
  share its tables. `positions=`, instead of `max_distance` and `head_width`, takes
  existing tables, whose `key` and `value` may be set to pretrained ones, or other
  positions, such as `T5Positions(num_heads, rngs=rngs)`.

  To decode with flax's cache, set `self_attention=True`: flax passes one query without
  its position. Or give the position: as `input_positions` to the layer (flax 0.12.12),
  or by `nnx.view(model, query_positions=...)` to a complete model, layers of an
  `nnx.scan` included. The key in slot j of the cache has position j, unless
  `key_positions` are given in the same way. If there are as many queries as keys, both
  have positions 0, 1, 2, ... by default.

  Unlike flax, dropout draws each weight independently and ignores `broadcast_dropout`,
  softmax is computed in float32 or wider, and a fully masked query gets zero.

  Args:
    max_distance: k, the distance at which positions are clipped.
    head_width: H, the layer's `qkv_features / num_heads`.
    self_attention: whether a single query of a cache has the position of the last key
      that the mask leaves, as flax's layer makes the mask in decoding. It is wrong for
      cross-attention.
    logits_soft_cap, implementation: of the operator.
    positions: the tables, or other positions; None makes new tables.
    options: of `RelativePositionTables`: num_heads, keys, values, beyond, left,
      table_init, ...

  >>> rngs = nnx.Rngs(0)
  >>> relative = RelativeAttention(16, head_width=8, rngs=rngs)
  >>> options = dict(attention_fn=relative, decode=False, rngs=rngs)
  >>> layer = nnx.MultiHeadAttention(4, 32, **options)
  >>> layer(jnp.ones((2, 5, 32)), is_causal=True).shape
  (2, 5, 32)
  """

  def __init__(
    self,
    max_distance: int | None = None,
    head_width: int | None = None,
    *,
    positions: Positions | None = None,
    self_attention: bool = False,
    logits_soft_cap: float | None = None,
    implementation: str | None = None,
    rngs: nnx.Rngs | None = None,
    **options: Unpack[TableOptions],
  ):
    if isinstance(positions, Positions) and max_distance is None and not options:
      self.tables = positions  # the name in checkpoints
    elif positions is None and None not in (max_distance, head_width, rngs):
      self.tables = RelativePositionTables(
        max_distance, head_width, rngs=rngs, **options
      )
    else:
      raise ValueError(
        "RelativeAttention wants max_distance, head_width and rngs, or positions= "
        f"alone, such as AlibiPositions(8); positions is {positions!r:.60}"
      )
    # Positions without parameters get a scalar, stacked as layers are: see `set_view`.
    self.scalar = None if nnx.state(self.tables) else nnx.Variable(jnp.zeros(()))
    self.rank = min(leaf.ndim for leaf in self._leaves())
    self.self_attention = self_attention
    self.logits_soft_cap = logits_soft_cap
    self.implementation = implementation
    self.query_positions = nnx.data(None)
    self.key_positions = nnx.data(None)

  def set_view(
    self,
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
  ) -> None:
    """Sets positions for `nnx.view`: integers `[B, T]` or `[T]`, and `[B, S]` or `[S]`.

    Layers stacked for `nnx.scan` get a copy each, along the same first axis as their
    tables.
    """
    smallest = min(self._leaves(), key=jnp.ndim)
    stack = smallest.shape[: smallest.ndim - self.rank]
    if query_positions is not None:
      x = as_array("query_positions", query_positions)
      self.query_positions = jnp.broadcast_to(x, (*stack, *x.shape))
    if key_positions is not None:
      x = as_array("key_positions", key_positions)
      self.key_positions = jnp.broadcast_to(x, (*stack, *x.shape))

  def _leaves(self) -> list[Array]:
    return jax.tree.leaves(nnx.state((self.tables, self.scalar)))

  def __call__(
    self,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K H"],
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    module: nnx.Module | None = None,
    qk_attn_weights_einsum: object = ...,
    **options,
  ) -> Float[Array, "*B T N H"]:
    """Attends as `nnx.dot_product_attention`; bias and mask broadcast to [*B, N, T, S].

    Further options are those of `attend_as_flax`. If `module` is given, sows the
    weights before dropout as its `attention_weights`. Raises TypeError if called by a
    Linen layer.
    """
    if qk_attn_weights_einsum is not ...:  # only Linen's layers have it
      raise TypeError(
        "a Linen layer was given relpos_jax.nn.RelativeAttention, whose tables would "
        "not train: give it relpos_jax.linen.RelativeAttention"
      )
    options |= dict(module=module, collection=nnx.Intermediate)
    tensors = query, key, value, bias, mask
    return attend_as_flax(self, self.tables.arguments, *tensors, **options)


@runtime_checkable
class _Hook(Protocol):
  """The settings of a `RelativeAttention`, NNX's or Linen's."""

  query_positions: ArrayLike | None
  key_positions: ArrayLike | None
  self_attention: bool
  logits_soft_cap: float | None
  implementation: str | None


def attend_as_flax(
  hook: _Hook,
  arguments: Callable[..., dict[str, Any]],
  query: Float[Array, "*B T N H"],
  key: Float[Array, "*B S K H"],
  value: Float[Array, "*B S K H"],
  bias: ArrayLike | None,
  mask: ArrayLike | None,
  *,
  collection: Any,
  module: Any = None,
  is_causal: bool = False,
  input_positions: ArrayLike | None = None,
  key_positions: ArrayLike | None = None,
  broadcast_dropout: bool = True,
  dropout_rng: Array | None = None,
  dropout_rate: float = 0.0,
  deterministic: bool = False,
  dtype: DTypeLike | None = None,
  precision: object = None,
  **unsupported,
) -> Float[Array, "*B T N H"]:
  """Calls the operator with flax's arguments.

  These are any batch axes, numbers as masks, a `dtype`. Positions are those given, or
  those of the `hook`, an NNX or Linen `RelativeAttention`; `arguments` is that of
  `Positions`. Sows weights in the `collection` of a `module`. Raises
  NotImplementedError for settings that the operator does not have.
  """
  for name, setting in unsupported.items():
    if setting is not None:
      raise NotImplementedError(
        f"{name} is {setting!r:.60}; RelativeAttention wants None"
      )
  query, key, value = promote_dtype(query, key, value, dtype=dtype)
  query_positions, key_positions, query_offset = _positions(
    hook, query, key, mask, input_positions, key_positions
  )
  if mask is not None:
    mask = jnp.asarray(mask) != 0  # flax takes numbers, too
  options: dict[str, Any] = dict(
    bias=bias,
    mask=mask,
    is_causal=is_causal,
    logits_soft_cap=hook.logits_soft_cap,
    query_positions=query_positions,
    key_positions=key_positions,
    query_offset=query_offset,
  )
  with jax.default_matmul_precision(_precision_name(precision)):
    options |= arguments(query, key, query_positions, key_positions, query_offset)
    if module is not None:
      weights = attention_weights(**options).astype(query.dtype)
      module.sow(collection, "attention_weights", weights)
    if not deterministic:
      options |= dict(dropout_rate=dropout_rate, dropout_key=dropout_rng)
    options |= dict(value=value, implementation=hook.implementation)
    return dot_product_attention(**options)


def _precision_name(precision: Any) -> str | None:
  """Returns the name of a precision that flax takes; of None, JAX's default."""
  if isinstance(precision, tuple):
    (precision,) = {*precision}  # one for both operands
  if isinstance(precision, jax.lax.Precision):
    precision = precision.name
  if not precision:
    return jax.config.jax_default_matmul_precision
  is_preset = "_" in precision  # such as BF16_BF16_F32: JAX wants capitals
  return precision if is_preset else precision.lower()


def _positions(
  hook: _Hook,
  query: Array,
  key: Array,
  mask: ArrayLike | None,
  query_positions: ArrayLike | None,
  key_positions: ArrayLike | None,
) -> tuple[Array | None, Array | None, Array | None]:
  """Returns the operator's positions of queries and keys, and offset of queries.

  They are those of the call, or the hook's. Raises ValueError if both lack them, unless
  there are as many queries as keys.
  """
  *batch, num_queries, _, _ = query.shape
  num_keys = key.shape[-3]
  if query_positions is None:
    query_positions = hook.query_positions
  if key_positions is None:
    key_positions = hook.key_positions
  if query_positions is None and num_queries != num_keys:
    query_positions = _position_in_cache(hook, num_queries, num_keys, mask)
  if key_positions is None and num_queries == num_keys:
    key_positions = query_positions
  query_positions = _broadcast_positions("query_positions", query_positions, batch)
  key_positions = _broadcast_positions("key_positions", key_positions, batch)
  if key_positions is None and query_positions is not None and num_queries == 1:
    return None, None, query_positions[..., 0]  # more implementations take an offset
  return query_positions, key_positions, None


def _position_in_cache(
  hook: _Hook, num_queries: int, num_keys: int, mask: ArrayLike | None
) -> Array:
  """Returns the position of the last key that the mask leaves to the one query.

  Flax's layers make such a mask in cached decoding, and pass no position.
  """
  if hook.self_attention and num_queries == 1 and mask is not None:
    last_BN1 = mask.shape[-1] - 1 - jnp.argmax(mask[..., ::-1] != 0, axis=-1)
    return last_BN1[..., 0, :]
  raise ValueError(
    f"RelativeAttention lacks the positions of {num_queries} queries and {num_keys} "
    "keys: set self_attention=True if it is one query of the keys' sequence, or give "
    "query_positions (NNX: by nnx.view, Linen: as its attribute)"
  )


def _broadcast_positions(
  name: str, positions: ArrayLike | None, batch: list[int]
) -> Array | None:
  """Returns positions of each row, or `[T]` if all rows have the same."""
  if positions is None:
    return None
  positions = as_array(name, positions)
  *own_batch, length = positions.shape
  if math.prod(own_batch) == 1:
    return positions.reshape(length)
  return jnp.broadcast_to(positions, (*batch, length))
