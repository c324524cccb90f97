"""Published relative and rotary positions other than Shaw's, for attention layers."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from relpos_jax.attention.relations import (
  ContentBias,
  DistanceBias,
  KeyBias,
  LinearBias,
  RelativePositions,
)
from relpos_jax.attention.rotary import rotate
from relpos_jax.nn.positions import (
  Positions,
  RelativePositionTables,
  new_table,
  sinusoids,
  table_shape,
)
from relpos_jax.typing import Array, ArrayLike, Float


class T5Positions(Positions):
  """Owns T5's relative position biases by distance bucket, `[num_buckets, N]`.

  Raffel et al. 2020, section 2.1. In T5, all layers share one such table. T5 has no
  scale: to load its weights, multiply the query projection by H**0.5.

  Args:
    num_heads: N.
    max_distance: the distance from which on all keys share the last bucket.
    bidirectional: whether later keys have their own half of the buckets.
    num_buckets: the total number, reduced if `max_distance` is too small for it.

  >>> T5Positions(8, bidirectional=False, rngs=nnx.Rngs(0))().table.shape
  (129, 8)
  """

  def __init__(
    self,
    num_heads: int,
    max_distance: int = 128,
    *,
    bidirectional: bool = True,
    num_buckets: int = 32,
    param_dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    if max_distance < 2:
      raise ValueError(f"max_distance is {max_distance}; want 2 or more")
    sides = 2 if bidirectional else 1
    if num_buckets < 2 * sides:
      raise ValueError(f"num_buckets is {num_buckets}; want {2 * sides} or more")
    # Half of a side's buckets hold one distance each, and must end before max_distance.
    most = 2 * max_distance - 1
    rows_of_side = min(num_buckets // sides, most)
    shape = sides * rows_of_side, num_heads
    self.buckets = new_table(rngs, shape, param_dtype)
    self.bidirectional = bidirectional
    self.max_distance = max_distance

  def __call__(self) -> DistanceBias:
    return DistanceBias.t5(self.buckets[...], self.bidirectional, self.max_distance)


class AlibiPositions(Positions):
  """Adds ALiBi's bias: a fixed slope for each head, no parameters. Press et al. 2022.

  It is for causal attention: without a causal mask it cannot tell left from right.

  >>> AlibiPositions(8)().slopes.shape
  (8,)
  """

  def __init__(self, num_heads: int, *, rngs: nnx.Rngs | None = None):
    self.num_heads = num_heads

  def __call__(self) -> LinearBias:
    return LinearBias.alibi(self.num_heads)


class RotaryPositions(Positions):
  """Rotates queries and keys by position, without parameters. Su et al. 2021.

  `base` and `frequencies` are as in `relpos_jax.rotate`.

  >>> q = k = jnp.ones((2, 5, 8, 64))
  >>> RotaryPositions().arguments(q, k)["query"].shape
  (2, 5, 8, 64)
  """

  def __init__(
    self,
    base: float = 10_000.0,
    *,
    frequencies: ArrayLike | None = None,
    rngs: nnx.Rngs | None = None,
  ):
    self.base = base
    self.frequencies = None
    if frequencies is not None:
      # A tuple is not part of the state, unlike an array, and stacked layers share it.
      self.frequencies = tuple(np.asarray(frequencies, float).tolist())

  def arguments(
    self,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
  ) -> dict:
    starts_at_zero = query_positions is None and query_offset is None
    if key_positions is None:
      key_positions = jnp.arange(key.shape[-3])
    if query_positions is None:
      offset = jnp.asarray(0 if query_offset is None else query_offset)
      query_positions = jnp.add.outer(offset, jnp.arange(query.shape[-3]))
    if not starts_at_zero:
      # Only distances matter, and the angles of large positions would be rounded.
      query_positions, key_positions = map(_signed, (query_positions, key_positions))
      last = jnp.max(query_positions, axis=-1, keepdims=True, initial=-(2**31))
      query_positions = query_positions - last
      key_positions = key_positions - last
    frequencies = None if self.frequencies is None else np.array(self.frequencies)
    query = rotate(query, query_positions, self.base, frequencies)
    key = rotate(key, key_positions, self.base, frequencies)
    return dict(query=query, key=key)


def _signed(positions: ArrayLike) -> Array:
  """Returns integer positions as int32, in which their differences are exact."""
  positions = jnp.asarray(positions)
  is_integer = jnp.issubdtype(positions.dtype, jnp.integer)
  return positions.astype(jnp.int32) if is_integer else positions


class TransformerXLPositions(Positions):
  """Owns Transformer-XL's u and v, and a projection of sinusoids by distance.

  Dai et al. 2019, section 3.3: logits are q_i . k_j + q_i . r_ij + u . k_j + v . r_ij,
  all scaled, and r_ij is the projected sinusoid of the distance i - j. The paper does
  not clip distances: to do the same, give the longest length as `max_distance`. The
  wavelengths are Tensor2Tensor's, as in `sinusoids`; those of the authors' code are a
  little shorter.

  Args:
    width: the width of the sinusoids, an even number.
    num_heads, head_width: N and H.
    max_distance, left: distances at which positions are clipped, as in
      `RelativePositionTables`.

  >>> xl = TransformerXLPositions(32, 4, 8, 16, rngs=nnx.Rngs(0))
  >>> q = k = jnp.ones((2, 5, 4, 8))
  >>> xl.arguments(q, k)["relations"].table.shape
  (33, 4, 8)
  """

  def __init__(
    self,
    width: int,
    num_heads: int,
    head_width: int,
    max_distance: int,
    *,
    left: int | None = None,
    param_dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    if width % 2:
      raise ValueError(f"width is {width}; want an even number")
    self.num_rows, *_ = table_shape(max_distance, left, None, head_width)
    self.left = self.num_rows - 1 - max_distance
    init = jax.nn.initializers.lecun_uniform(0, (1, 2))
    shape = width, num_heads, head_width
    self.projection = new_table(rngs, shape, param_dtype, init)
    shape = num_heads, head_width
    self.u = nnx.Param(jnp.zeros(shape, param_dtype))
    self.v = nnx.Param(jnp.zeros(shape, param_dtype))

  def arguments(self, query: Float[Array, "*B T N H"], key: Array, *_, **__) -> dict:
    _check_heads(query, *self.u.shape)
    dtype = query.dtype
    projection = self.projection[...].astype(dtype)
    distances = self.left - jnp.arange(self.num_rows)
    waves = sinusoids(distances, len(projection))
    table = jnp.einsum("RD,DNH->RNH", waves.astype(dtype), projection)
    u = jnp.broadcast_to(self.u[...].astype(dtype), query.shape)
    v = jnp.broadcast_to(self.v[...].astype(dtype), query.shape)
    scale = query.shape[-1] ** -0.5
    content = (query + v) * scale
    relations = ContentBias(content, table, left=self.left)
    return dict(query=query + u, key=key, relations=relations, scale=scale)


class ContentPositions(Positions):
  """Owns a vector of width P for each distance, and projects queries to width P.

  It adds (q_i W) . w[j - i] to the logit, and nothing for distances beyond the table.
  Each head has its own matrix W, [H, P]. All heads share the vectors w. P is `rank`.
  Inkling (Thinking Machines 2026) has the same term, but projects the layer's input in
  place of the query.

  >>> bank = ContentPositions(4, 8, 16, rngs=nnx.Rngs(0))
  >>> q = k = jnp.ones((2, 5, 4, 8))
  >>> bank.arguments(q, k)["relations"].query.shape
  (2, 5, 4, 16)
  """

  def __init__(
    self,
    num_heads: int,
    head_width: int,
    max_distance: int,
    *,
    left: int | None = None,
    rank: int = 16,
    param_dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    init = jax.nn.initializers.lecun_uniform(0, 2, batch_axis=1)
    shape = head_width, num_heads, rank
    self.projection = new_table(rngs, shape, param_dtype, init)
    shape = table_shape(max_distance, left, None, rank)
    self.bank = new_table(rngs, shape, param_dtype)
    self.left = left

  def arguments(self, query: Float[Array, "*B T N H"], key: Array, *_, **__) -> dict:
    width, heads, _ = self.projection.shape
    _check_heads(query, heads, width)
    projection = self.projection[...].astype(query.dtype)
    content = jnp.einsum("...NH,HNP->...NP", query, projection)
    bank = self.bank[...]
    relations = ContentBias(content, bank, beyond="zero", left=self.left)
    return dict(query=query, key=key, relations=relations)


class DebertaPositions(Positions):
  """Owns DeBERTa's two tables, one for queries and one for keys.

  He et al. 2021, section 3.1: logits are q_i . k_j + q_i . w[j - i] + k_j . w'[j - i],
  times (3 H)**-0.5. Here the tables are parameters. DeBERTa projects them from vectors
  that all layers share.

  >>> deberta = DebertaPositions(4, 8, 16, rngs=nnx.Rngs(0))
  >>> [type(relation).__name__ for relation in deberta()]
  ['RelativePositions', 'KeyBias']
  """

  def __init__(
    self,
    num_heads: int,
    head_width: int,
    max_distance: int,
    *,
    left: int | None = None,
    param_dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    shape = table_shape(max_distance, left, num_heads, head_width)
    self.of_query = new_table(rngs, shape, param_dtype)
    self.of_key = new_table(rngs, shape, param_dtype)
    self.left = left

  def __call__(self) -> tuple[RelativePositions, KeyBias]:
    content_to_position = RelativePositions(self.of_query[...], None, left=self.left)
    position_to_content = KeyBias(self.of_key[...], left=self.left)
    return content_to_position, position_to_content

  def arguments(self, query: Float[Array, "*B T N H"], key: Array, *_, **__) -> dict:
    width = query.shape[-1]
    scale = (3 * width) ** -0.5
    return super().arguments(query, key) | dict(scale=scale)


def _check_heads(query: Array, heads: int, width: int) -> None:
  if query.shape[-2:] != (heads, width):
    raise ValueError(
      f"query has shape {query.shape}; want {heads} heads of width {width}, as in "
      "these positions"
    )


# By name, as in the configs of models. None means that layers have no positions: the
# embedding adds sinusoids.
SCHEMES: dict[Any, type[Positions] | None] = dict(
  relative=RelativePositionTables,
  sinusoidal=None,
  both=RelativePositionTables,
  none=None,
  t5=T5Positions,
  alibi=AlibiPositions,
  rotary=RotaryPositions,
  xl=TransformerXLPositions,
  content=ContentPositions,
  deberta=DebertaPositions,
)
PositionsName = Literal[*SCHEMES]
