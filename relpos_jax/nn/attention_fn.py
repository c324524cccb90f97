"""Relative positions in your own model: an `attention_fn` for Flax's attention layers."""

import math
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
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
  softmax is computed in float32 or wider, and a query that sees no key gets zero.

  Args:
    max_distance: k, the distance at which positions are clipped.
    head_width: H, the layer's `qkv_features / num_heads`.
    self_attention: whether a single query of a cache has the position of the last key
      that the mask shows it, as flax's layer makes the mask in decoding. It is wrong
      for cross-attention.
    logits_soft_cap, implementation: of the operator.
    positions: the tables, or other positions; None makes new tables.
    options: of `RelativePositionTables`: num_heads, keys, values, beyond, left,
      table_init, ...

  >>> rngs = nnx.Rngs(0)
  >>> relative = RelativeAttention(16, head_width=8, rngs=rngs)
  >>> layer = nnx.MultiHeadAttention(4, 32, attention_fn=relative, decode=False, rngs=rngs)
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
        "RelativeAttention wants max_distance, head_width and rngs, or positions= alone, such "
        f"as AlibiPositions(8); positions is {positions!r:.60}"
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
    for name, x in dict(
      query_positions=query_positions, key_positions=key_positions
    ).items():
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
    """Attends as `nnx.dot_product_attention`; bias and mask broadcast to [*B, N, T, S].

    Further options are those of `attend_as_flax`. If `module` is given, sows the
    weights before dropout as its `attention_weights`. Raises TypeError if called by a
    Linen layer.
    """
    if qk_attn_weights_einsum is not ...:  # only Linen's layers have it
      raise TypeError(
        "a Linen layer was given relpos_jax.nn.RelativeAttention, whose tables would not train: "
        "give it relpos_jax.linen.RelativeAttention"
      )
    tensors, options = (query, key, value, bias, mask), options | dict(module=module)
    arguments = self.tables.arguments
    return attend_as_flax(
      self, arguments, *tensors, collection=nnx.Intermediate, **options
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
  """Calls the operator with flax's arguments: any batch axes, numbers as masks, a
  `dtype`.

  Takes positions and implementation of the `hook`, an NNX or Linen `RelativeAttention`,
  unless positions are given; `arguments` is that of `Positions`. Sows weights in the
  `collection` of a `module`. Raises NotImplementedError for settings that the operator
  does not have.
  """
  for name, setting in unsupported.items():
    if setting is not None:
      raise NotImplementedError(
        f"{name} is {setting!r:.60}; RelativeAttention wants None"
      )
  *batch, num_queries, _, _ = query.shape
  num_keys = key.shape[-3]
  queries = hook.query_positions if input_positions is None else input_positions
  keys = hook.key_positions if key_positions is None else key_positions
  if queries is None and hook.self_attention and num_queries == 1 and mask is not None:
    last_BN1 = mask.shape[-1] - 1 - jnp.argmax(mask[..., ::-1] != 0, axis=-1)
    queries = last_BN1[..., 0, :]
  if queries is None and num_queries != num_keys:
    remedy = (
      "set self_attention=True if they are of one sequence, or "
      if num_queries == 1
      else ""
    )
    raise ValueError(
      f"RelativeAttention lacks the positions of {num_queries} queries and {num_keys} keys: "
      f"{remedy}give query_positions (NNX: by nnx.view, Linen: as its attribute)"
    )
  if keys is None and num_queries == num_keys:
    keys = queries
  dtype = jnp.result_type(query, key, value) if dtype is None else dtype
  q, k, v = (x.astype(dtype) for x in (query, key, value))
  queries = _positions("query_positions", queries, batch)
  options = dict(
    bias=bias,
    mask=None if mask is None else jnp.asarray(mask) != 0,
    is_causal=is_causal,
    logits_soft_cap=hook.logits_soft_cap,
    key_positions=_positions("key_positions", keys, batch),
  )
  if keys is None and queries is not None and num_queries == 1:
    options["query_offset"] = queries[..., 0]  # supported by more implementations
  else:
    options["query_positions"] = queries
  if isinstance(precision, tuple):
    (precision,) = {*precision}  # one for both operands
  name = getattr(
    precision, "name", precision
  )  # of a `jax.lax.Precision`; or the name itself
  if name and "_" not in name:  # presets are in capitals
    name = name.lower()
  precision = name or jax.config.jax_default_matmul_precision
  with jax.default_matmul_precision(precision):
    names = "query_positions", "key_positions", "query_offset"
    options |= dict(query=q, key=k) | arguments(q, k, *map(options.get, names))
    if module is not None:
      module.sow(
        collection, "attention_weights", attention_weights(**options).astype(dtype)
      )
    if not deterministic:
      options |= dict(dropout_rate=dropout_rate, dropout_key=dropout_rng)
    return dot_product_attention(value=v, **options, implementation=hook.implementation)


def _positions(name: str, x: ArrayLike | None, batch: list[int]) -> Array | None:
  """Returns positions of each row, or `[T]` if all rows have the same."""
  if x is None:
    return None
  x = as_array(name, x)
  *own, length = x.shape
  return (
    x.reshape(length) if math.prod(own) == 1 else jnp.broadcast_to(x, (*batch, length))
  )
