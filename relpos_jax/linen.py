"""The Linen version of `relpos_jax.nn.RelativeAttention`, with the same parameter names."""

import dataclasses
import functools
from typing import Any

from flax import linen as nn
from jax.typing import DTypeLike

from relpos_jax.attention.relations import RelativePositions
from relpos_jax.nn.hooks import attend_as_flax
from relpos_jax.nn.positions import init_table
from relpos_jax.typing import Array, ArrayLike, Float

__all__ = ["RelativeAttention", "RelativePositionTables"]


class RelativePositionTables(nn.Module):
  """Owns the trained vectors w^K and w^V: see `relpos_jax.nn.RelativePositionTables`.

  Calling it with the width of a row, H, returns the relation of its tables.

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
    shape = (2 * self.max_distance + 1, *heads, head_width)
    key = self.param("key", init_table, shape) if self.keys else None
    value = self.param("value", init_table, shape) if self.values else None
    return RelativePositions(key, value, beyond=self.beyond)


class RelativeAttention(nn.Module):
  """The `attention_fn` of a `MultiHeadDotProductAttention` with relative positions.

  It owns the tables: `attention_fn/tables/key` and `attention_fn/tables/value` in "params" of the
  layer it is given to, also if it is made inside a compact method. To call it yourself, or to
  share its tables between layers, name its parent:
  `RelativeAttention(16, parent=self, name="relative")`.

  Positions, dropout and softmax are as in `relpos_jax.nn.RelativeAttention`: cached decoding raises
  unless `query_positions` are given. `precision` and the einsums must be None.

  Attributes:
    max_distance: k, the distance at which positions are clipped.
    num_heads, keys, values, beyond: as of `relpos_jax.nn.RelativePositionTables`.
    query_positions: integers `[B, T]` or `[T]`.
    key_positions: integers `[B, S]` or `[S]`.
    implementation: of the operator; None takes the fastest that supports the call.

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
    default = next(field.default for field in dataclasses.fields(self) if field.name == "parent")
    if self.parent is default:
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
    module: nn.Module | None = None,
    is_causal: bool = False,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: object = None,
    qk_attn_weights_einsum: object = None,
    attn_weights_value_einsum: object = None,
  ) -> Float[Array, "*B T N H"]:
    """Attends as flax's `dot_product_attention`; bias and mask broadcast to [*B, N, T, S].

    If `module` is given, sows the weights before dropout as its `attention_weights`. (Linen passes
    only arguments that the signature names, so it names all that change the result.)
    """
    tables = RelativePositionTables(
      self.max_distance, self.num_heads, self.keys, self.values, self.beyond, name="tables"
    )
    return attend_as_flax(
      self,
      tables(query.shape[-1]),
      query,
      key,
      value,
      bias,
      mask,
      sow=None if module is None else functools.partial(module.sow, "intermediates"),
      is_causal=is_causal,
      dropout_rng=dropout_rng,
      dropout_rate=dropout_rate,
      deterministic=deterministic,
      dtype=dtype,
      precision=precision,
      qk_attn_weights_einsum=qk_attn_weights_einsum,
      attn_weights_value_einsum=attn_weights_value_einsum,
    )
