"""Relative positions for Flax's own attention layers, as an `attention_fn`."""

import math
from collections.abc import Callable
from typing import Any, Unpack

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
  """Adds relative positions to `nnx.MultiHeadAttention`, as its `attention_fn`.

  It owns the tables. In the parameters of the layer they are `attention_fn/tables/key`
  and `attention_fn/tables/value`. Layers with the same object share its tables. To use
  existing tables or other positions, such as `T5Positions(num_heads, rngs=rngs)`, give
  `positions=` instead of `max_distance` and `head_width`.

  If there are as many queries as keys, both have positions 0, 1, 2, ... by default. In
  decoding with flax's cache, flax passes one query without its position. Then do one of
  the following:

  - Set `self_attention=True`.
  - Pass `input_positions` to the layer (flax 0.12.12).
  - Call `nnx.view(model, query_positions=...)` for a complete model, which may use
    `nnx.scan`.

  Slot j of the cache has position j, unless you pass `key_positions` to the layer or to
  `nnx.view`.

  Dropout differs from flax: it draws each weight independently and ignores
  `broadcast_dropout`. Softmax is computed in float32, or float64 for float64 inputs,
  and a fully masked query gets zero.

  Args:
    max_distance: k, the distance at which positions are clipped.
    head_width: H, `qkv_features / num_heads` of the layer.
    self_attention: whether the position of a single query with a cache is the last one
      that the mask allows. Flax's layers make such a mask in decoding. Do not set it
      for cross-attention.
    logits_soft_cap, implementation: as in `dot_product_attention`.
    positions: existing tables, or other positions; None makes new tables.
    options: for `RelativePositionTables`: num_heads, keys, values, beyond, left,
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
    elif (
      positions is not None
      or max_distance is None
      or head_width is None
      or rngs is None
    ):
      raise ValueError(
        "RelativeAttention wants max_distance, head_width and rngs, or positions= "
        f"alone, such as AlibiPositions(8); positions is {positions!r:.60}"
      )
    else:
      self.tables = RelativePositionTables(
        max_distance, head_width, rngs=rngs, **options
      )
    # Positions without parameters get a scalar: under `nnx.scan` it is stacked like the
    # layers, and `set_view` reads the number of layers from it.
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
    """Sets the positions of queries and keys; `nnx.view` calls this.

    Query positions are `[B, T]` or `[T]`, key positions `[B, S]` or `[S]`. Layers that
    are stacked for `nnx.scan` get a copy each, along the first axes of their tables.
    """
    smallest = min(self._leaves(), key=jnp.ndim)
    stack = smallest.shape[: smallest.ndim - self.rank]
    positions = dict(query_positions=query_positions, key_positions=key_positions)
    for name, x in positions.items():
      if x is not None:
        x = as_array(name, x)
        setattr(self, name, jnp.broadcast_to(x, (*stack, *x.shape)))

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
    """Computes attention in place of `nnx.dot_product_attention`.

    Bias and mask broadcast to [*B, N, T, S]. If `module` is given, its method `sow`
    stores the weights before dropout in it, as `attention_weights`. `options` are other
    arguments of `attend_as_flax`. Raises TypeError if a Linen layer calls this method.
    """
    if qk_attn_weights_einsum is not ...:  # only Linen's layers have it
      raise TypeError(
        "a Linen layer has relpos_jax.nn.RelativeAttention, and would not train its "
        "tables: give it relpos_jax.linen.RelativeAttention"
      )
    return attend_as_flax(
      self,
      self.tables.arguments,
      query,
      key,
      value,
      bias,
      mask,
      collection=nnx.Intermediate,
      module=module,
      **options,
    )


def attend_as_flax(
  hook: Any,
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
  """Calls the operator with the arguments that flax passes to an `attention_fn`.

  Casts query, key and value to `dtype`. A mask may hold numbers, where 0 masks. `hook`
  is an NNX or Linen `RelativeAttention`; its positions apply if flax passes none.
  `arguments` is the method `Positions.arguments` of its tables or other positions. If
  there is a `module`, its method `sow` stores the weights in `collection`. Raises
  NotImplementedError for settings that the operator lacks.
  """
  for name, setting in unsupported.items():
    if setting is not None:
      raise NotImplementedError(
        f"{name} is {setting!r:.60}; RelativeAttention wants None"
      )
  query, key, value = promote_dtype(query, key, value, dtype=dtype)
  if mask is not None:
    mask = jnp.asarray(mask) != 0  # flax allows masks of numbers
  query_positions, key_positions, query_offset = _positions(
    hook, query, key, mask, input_positions, key_positions
  )
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
  """Converts a precision from flax to a name for JAX; None becomes JAX's default."""
  if isinstance(precision, tuple):
    (precision,) = {*precision}  # both operands must have the same
  if not precision:
    return jax.config.jax_default_matmul_precision  # pyright: ignore
  # JAX wants capitals for a name such as BF16_BF16_F32, and otherwise lower case.
  name = str(precision)
  return name if "_" in name else name.lower()


def _positions(
  hook: Any,
  query: Array,
  key: Array,
  mask: Array | None,
  query_positions: ArrayLike | None,
  key_positions: ArrayLike | None,
) -> tuple[Array | None, Array | None, Array | None]:
  """Returns query positions, key positions and query offset for the operator.

  Positions come from the call, or else from the hook. If neither gives query positions,
  and there are not as many queries as keys, they come from `_position_by_mask`.
  """
  *batch, num_queries, _, _ = query.shape
  num_keys = key.shape[-3]
  if query_positions is None:
    query_positions = hook.query_positions
  if key_positions is None:
    key_positions = hook.key_positions
  if query_positions is None and num_queries != num_keys:
    query_positions = _position_by_mask(hook, num_queries, num_keys, mask)
  if key_positions is None and num_queries == num_keys:
    key_positions = query_positions
  query_positions = _broadcast_positions("query_positions", query_positions, batch)
  key_positions = _broadcast_positions("key_positions", key_positions, batch)
  if key_positions is None and query_positions is not None and num_queries == 1:
    return None, None, query_positions[..., 0]  # more implementations take an offset
  return query_positions, key_positions, None


def _position_by_mask(
  hook: Any, num_queries: int, num_keys: int, mask: Array | None
) -> Array:
  """Returns the position of the last key that the one query may attend to.

  In cached decoding, flax's layers make a mask but pass no position. Raises ValueError
  without a mask, for several queries, or if `self_attention` is not set.
  """
  if hook.self_attention and num_queries == 1 and mask is not None:
    last_BN1 = num_keys - 1 - jnp.argmax(mask[..., ::-1], axis=-1)
    return last_BN1[..., 0, :]
  raise ValueError(
    f"RelativeAttention lacks the positions of {num_queries} queries and {num_keys} "
    "keys: set self_attention=True for one query with a cache, or give "
    "query_positions (NNX: by nnx.view, Linen: as its attribute)"
  )


def _broadcast_positions(
  name: str, positions: ArrayLike | None, batch: list[int]
) -> Array | None:
  """Broadcasts positions to the batch, or returns `[T]` if all sequences share them."""
  if positions is None:
    return None
  positions = as_array(name, positions)
  *own_batch, length = positions.shape
  if math.prod(own_batch) == 1:
    return positions.reshape(length)
  return jnp.broadcast_to(positions, (*batch, length))
