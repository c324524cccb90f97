"""The Linen twin of `relpos_jax.nn.RelativeAttention`, with the same names of parameters."""

import dataclasses
import functools
from typing import Any

from flax import linen as nn
from jax.typing import DTypeLike

from relpos_jax.attention.relations import RelativePositions
from relpos_jax.attention.validation import check_sizes
from relpos_jax.nn.hooks import hooked_attention, refuse
from relpos_jax.nn.positions import init_table
from relpos_jax.typing import Array, ArrayLike, Float

__all__ = ["RelativeAttention", "RelativePositionTables"]


class RelativePositionTables(nn.Module):
  """Owns the trained vectors w^K and w^V: see `relpos_jax.nn.RelativePositionTables`.

  Called with the width of a row, H, it returns the relation of its tables.

  >>> import jax
  >>> relations, _ = RelativePositionTables(16, num_heads=8).init_with_output(jax.random.key(0), 64)
  >>> relations.key.shape
  (33, 8, 64)
  """

  max_distance: int
  num_heads: int | None = None
  keys: bool = True
  values: bool = True
  beyond: str = "clip"

  @nn.compact
  def __call__(self, head_width: int) -> RelativePositions:
    heads = () if self.num_heads is None else (self.num_heads,)
    check_sizes(0, max_distance=self.max_distance)
    check_sizes(1, num_heads=1 if self.num_heads is None else self.num_heads)
    shape = (2 * self.max_distance + 1, *heads, head_width)
    key = self.param("key", init_table, shape) if self.keys else None
    value = self.param("value", init_table, shape) if self.values else None
    return RelativePositions(key, value, beyond=self.beyond)


class RelativeAttention(nn.Module):
  """The `attention_fn` of a `MultiHeadDotProductAttention` that shall see relative positions.

  It owns the tables: `attention_fn/tables/key` and `attention_fn/tables/value` in "params" of the
  layer it is given to, wherever it is made (other modules made within a compact method become
  that method's own, with counted names). To call it yourself, or to share its tables by several
  layers, say whose it is: `RelativeAttention(16, parent=self, name="relative")`.

  Queries and keys have positions 0, 1, 2, ... where there are as many of them. In cached decoding
  there is one query, the layer does not say which, and the call is refused unless
  `query_positions` are given. The key in slot j of the cache then has position j, if
  `key_positions` do not say otherwise.

  Unlike flax, dropout draws each weight apart, whatever `broadcast_dropout` says; softmax is always
  in float32 or wider; a query that sees no key gets zero. There is no `precision`: leave it
  None and set `jax.default_matmul_precision`. Nor are there einsums of one's own.

  Attributes:
    max_distance: k, the distance beyond which positions are alike.
    num_heads, keys, values, beyond: as of `relpos_jax.nn.RelativePositionTables`.
    query_positions: integers `[B, T]` or `[T]`.
    key_positions: integers `[B, S]` or `[S]`.
    implementation: of the operator; None takes the fastest that can do the call.

  Raises, when called:
    ValueError: positions are needed, or an argument does not fit.
    NotImplementedError: `precision` or an einsum is given.

  >>> import jax
  >>> import jax.numpy as jnp
  >>> layer = nn.MultiHeadDotProductAttention(4, attention_fn=RelativeAttention(16))
  >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 32)))
  >>> variables["params"]["attention_fn"]["tables"]["key"].shape
  (33, 8)
  """

  max_distance: int
  num_heads: int | None = None
  keys: bool = True
  values: bool = True
  beyond: str = "clip"
  query_positions: Any = None
  key_positions: Any = None
  implementation: str | None = None

  def __post_init__(self) -> None:
    unsaid = next(field.default for field in dataclasses.fields(self) if field.name == "parent")
    if self.parent is unsaid:
      # So that the attention layer adopts it, under the name of its own attribute.
      object.__setattr__(self, "parent", None)
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S N H"],
    value: Float[Array, "*B S N H"],
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: object = None,
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: object = None,
    attn_weights_value_einsum: object = None,
    is_causal: bool = False,
    input_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
  ) -> Float[Array, "*B T N H"]:
    """Attends as flax's `dot_product_attention`; bias and mask broadcast to [*B, N, T, S].

    Sows the weights, before dropout, as `attention_weights` of `module`, if given. (Every argument
    has a name: Linen leaves out those it does not find in the signature, the mask too.)
    """
    refuse(
      precision=precision,
      qk_attn_weights_einsum=qk_attn_weights_einsum,
      attn_weights_value_einsum=attn_weights_value_einsum,
    )
    tables = RelativePositionTables(
      self.max_distance, self.num_heads, self.keys, self.values, self.beyond, name="tables"
    )
    return hooked_attention(
      tables(query.shape[-1]),
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
      sow=None if module is None else functools.partial(module.sow, "intermediates"),
      implementation=self.implementation,
    )
