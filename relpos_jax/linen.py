"""The Linen version of `relpos_jax.nn.RelativeAttention`.

Parameters have the same names in both.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.core import Scope
from jax.typing import DTypeLike

from relpos_jax.attention.relations import RelativePositions
from relpos_jax.nn.attention_fn import attend_as_flax
from relpos_jax.nn.positions import init_table, table_shape
from relpos_jax.typing import Array, ArrayLike, Beyond, Float

__all__ = ["RelativeAttention", "RelativePositionTables"]


class RelativePositionTables(nn.Module):
  """Owns the trained vectors w^K and w^V: see `relpos_jax.nn.RelativePositionTables`.

  Call the module with H, the head width. It returns the relation that holds the tables.

  >>> import jax
  >>> tables = RelativePositionTables(16, num_heads=8)
  >>> relations, _ = tables.init_with_output(jax.random.key(0), 64)
  >>> relations.key.shape
  (33, 8, 64)
  """

  max_distance: int
  num_heads: int | None = None
  keys: bool = True
  values: bool = True
  beyond: Beyond = "clip"
  left: int | None = None
  param_dtype: DTypeLike = jnp.float32
  table_init: Callable[..., Array] = init_table

  @nn.compact
  def __call__(self, head_width: int) -> RelativePositions:
    shape = table_shape(self.max_distance, self.left, self.num_heads, head_width)
    key = value = None
    if self.keys:
      key = self.param("key", self.table_init, shape, self.param_dtype)
    if self.values:
      value = self.param("value", self.table_init, shape, self.param_dtype)
    return RelativePositions(key, value, beyond=self.beyond, left=self.left)

  def arguments(self, query: Array, key: Array, *_) -> dict[str, Any]:
    """Returns query, key and relations for the operator, as NNX's `Positions` do."""
    return dict(query=query, key=key, relations=self(query.shape[-1]))


class RelativeAttention(nn.Module):
  """Adds relative positions to `MultiHeadDotProductAttention`, as its `attention_fn`.

  It owns the tables. In the "params" of the layer they are `attention_fn/tables/key`
  and `attention_fn/tables/value`. To call it yourself, or to share its tables between
  layers, name its parent: `RelativeAttention(16, parent=self, name="relative")`.

  Dropout and softmax are as in `relpos_jax.nn.RelativeAttention`. In cached decoding,
  this module reads the position of the query from the layer's `cache_index`. It cannot
  do so if several layers share it: then set `self_attention`. Flax's einsum arguments
  must be None.

  Attributes:
    max_distance: k, the distance at which positions are clipped; None with `positions`.
    num_heads, keys, values, beyond, left, param_dtype, table_init: as in
      `relpos_jax.nn.RelativePositionTables`.
    query_positions: integers `[B, T]` or `[T]`. The default is 0, 1, 2, ..., or the
      position in the cache.
    key_positions: integers `[B, S]` or `[S]`.
    logits_soft_cap, implementation: as in `dot_product_attention`.
    self_attention: as in `relpos_jax.nn.RelativeAttention`.
    positions: None for tables, or other positions of `relpos_jax.nn`, converted to a
      Linen module. For example
      `RelativeAttention(positions=to_linen(T5Positions, 8))`, with `to_linen` from
      `flax.nnx.bridge`. Their parameters are under `attention_fn/positions`.

  >>> import jax
  >>> import jax.numpy as jnp
  >>> layer = nn.MultiHeadDotProductAttention(4, attention_fn=RelativeAttention(16))
  >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 32)))
  >>> variables["params"]["attention_fn"]["tables"]["key"].shape
  (33, 8)
  """

  max_distance: int | None = None
  num_heads: int | None = None
  keys: bool = True
  values: bool = True
  beyond: Beyond = "clip"
  query_positions: Any = None
  key_positions: Any = None
  implementation: str | None = None
  left: int | None = None
  param_dtype: DTypeLike = jnp.float32
  table_init: Callable[..., Array] = init_table
  logits_soft_cap: float | None = None
  self_attention: bool = False
  positions: Any = None

  def __post_init__(self) -> None:
    unspecified = self.__dataclass_fields__["parent"].default
    if self.parent is unspecified:
      # Then the attention layer becomes its parent, and names it `attention_fn`.
      self.parent = None
    super().__post_init__()

  def setup(self) -> None:
    if self.positions is None and self.max_distance is not None:
      self.tables = RelativePositionTables(
        self.max_distance,
        num_heads=self.num_heads,
        keys=self.keys,
        values=self.values,
        beyond=self.beyond,
        left=self.left,
        param_dtype=self.param_dtype,
        table_init=self.table_init,
      )
    elif self.max_distance is not None or not isinstance(self.positions, nn.Module):
      raise ValueError(
        f"positions is {self.positions!r:.60} and max_distance {self.max_distance}; "
        "want None for one of them, and positions such as "
        "flax.nnx.bridge.to_linen(AlibiPositions, num_heads)"
      )

  # Not nn.compact, with which flax would raise before the TypeError below.
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
    **options,
  ) -> Float[Array, "*B T N H"]:
    """Attends like flax's `dot_product_attention`.

    Bias and mask broadcast to [*B, N, T, S]. If `module` is given, the weights before
    dropout are sown in it as `attention_weights`. Linen passes only the arguments that
    this signature names, so it names every argument that changes the result.
    """
    if self.scope is None:
      raise TypeError(
        "relpos_jax.linen.RelativeAttention was called outside of a Linen model: give "
        "an NNX layer relpos_jax.nn.RelativeAttention, or call it by init or apply"
      )
    if self.positions is None:
      arguments = self.tables.arguments
    else:
      arguments = functools.partial(self.positions, nnx_method="arguments")
    input_positions = None
    if self.query_positions is None and query.shape[-3] != key.shape[-3]:
      # Not by self.parent, which is not a module within a lifted transformation.
      input_positions = _position_by_index(self.scope.parent)
    return attend_as_flax(
      self,
      arguments,
      query,
      key,
      value,
      bias,
      mask,
      collection="intermediates",
      module=module,
      is_causal=is_causal,
      input_positions=input_positions,
      dropout_rng=dropout_rng,
      dropout_rate=dropout_rate,
      deterministic=deterministic,
      dtype=dtype,
      precision=precision,
      qk_attn_weights_einsum=qk_attn_weights_einsum,
      attn_weights_value_einsum=attn_weights_value_einsum,
      **options,
    )


def _position_by_index(layer: Scope | None) -> Array | None:
  """Returns the position of the query in the layer's cache; None without a cache."""
  if layer is None or not layer.has_variable("cache", "cache_index"):
    return None
  # The layer has already counted this query in the index.
  index = layer.get_variable("cache", "cache_index")
  return index.astype(jnp.int32)[None] - 1
