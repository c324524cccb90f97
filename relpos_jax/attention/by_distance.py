"""Relations by the signed distance j - i from query i to key j.

Rotary positions are in rotary.py: they rotate queries and keys before the call.
"""

import dataclasses
import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np

from relpos_jax.attention import lookup
from relpos_jax.attention.arrays import check_array, with_one_batch_axis
from relpos_jax.attention.relation import (
  Relation,
  Sizes,
  TableRelation,
  Tokens,
  VectorRelation,
  distances,
)
from relpos_jax.typing import Array, ArrayLike, Beyond, Float, Int, Leaf


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByDistance(TableRelation):
  """Looks up table rows by distance; `RelativePositions` says what the fields mean."""

  beyond: Beyond = dataclasses.field(default="clip", metadata={"static": True})
  left: int | None = dataclasses.field(default=None, metadata={"static": True})

  @property
  def reach(self) -> tuple[int, int]:
    """Returns how far the table reaches to the left and to the right, as distances."""
    left = self.num_rows // 2 if self.left is None else self.left
    return left, self.num_rows - 1 - left

  def labels(
    self, query_positions: Int[Array, "*#B T"], key_positions: Int[Array, "*#B S"]
  ) -> Int[Array, "*#B T S"]:
    """Returns the index of each pair's table row; -1 stands for the zero vector."""
    left, right = self.reach
    distance = distances(query_positions, key_positions)
    nearest = jnp.clip(distance, -left, right)
    rows = nearest + left  # clipped first: distance + left might not fit in 32 bits
    return rows if self.beyond == "clip" else jnp.where(distance == nearest, rows, -1)

  def rows(self, queries: Tokens, keys: Tokens) -> Int[Array, "#B T S"]:
    return self.labels(queries.positions, keys.positions)

  def with_rows(self, labels: Int[Array, " M"], left: int):
    """Returns the relation with other rows, of which `left` are for negative distances.

    New row m is the old row `labels[m]`, or zero if that label is -1.
    """
    relation = self.map_tables(lambda table: lookup.take_rows(table, labels))
    return dataclasses.replace(relation, left=left)

  def checked(self, name: str, sizes: Sizes) -> Relation:
    relation = self.with_checked_tables(name, sizes)
    num_rows, left = relation.num_rows, self.left
    if left is None and num_rows % 2 == 0:
      raise ValueError(
        f"{name} has {num_rows} rows; want an odd number, 2k + 1, or give left="
      )
    is_row = isinstance(left, numbers.Integral) and 0 <= left < num_rows
    if left is not None and not is_row:
      raise ValueError(
        f"{name}.left is {left!r}; want 0 to {num_rows - 1}, a table row"
      )
    if self.beyond not in ("clip", "zero"):
      raise ValueError(f'{name}.beyond is {self.beyond!r}; want "clip" or "zero"')
    return relation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RelativePositions(ByDistance, VectorRelation):
  """Adds Shaw et al.'s vector of a pair's clipped distance to keys and values.

  a_ij is row `clip(j - i, -left, right) + left` of a table of R = left + 1 + right
  rows. With the default symmetric table, R = 2k + 1, row 0 is "k or more to the left",
  row k is "same position" and row 2k is "k or more to the right". Shaw et al. 2018,
  section 3.2.

  Attributes:
    key, value: tables of aK and aV: `[R, H]`, shared by the heads, or `[R, N, H]`. None
      adds no such term.
    beyond: "clip" uses the nearest end row for a pair beyond the table; "zero" adds no
      term (Huang et al. 2018, Music Transformer).
    left: the number of rows before "same position". By default R must be odd, and left
      is (R - 1) / 2.

  >>> import jax.numpy as jnp
  >>> table = jnp.ones((2 * 3 + 1, 64))
  >>> relations = RelativePositions(key=table, value=None)
  >>> relations.labels(jnp.arange(1), jnp.arange(10))
  Array([[3, 4, 5, 6, 6, 6, 6, 6, 6, 6]], dtype=int32)
  """

  key: Leaf | None
  value: Leaf | None

  @classmethod
  def deberta(cls, buckets: ArrayLike, max_distance: int = 512) -> "RelativePositions":
    """Returns DeBERTa's content-to-position term, with a table row per distance.

    As in DeBERTa v2 and v3, each small distance has a bucket of its own, and other
    buckets grow with the logarithm of the distance. Add `KeyBias.deberta`, the other
    term, and give the operator `scale=(3 * H) ** -0.5`.

    Args:
      buckets: `[R, N, H]` or `[R, H]`, the projected embeddings in the order of the
        authors' code: row 0 is for keys far after the query. R is twice the authors'
        `position_buckets`.
      max_distance: the authors' `max_relative_positions`.

    >>> import jax.numpy as jnp
    >>> RelativePositions.deberta(jnp.arange(8.0)[:, None], max_distance=5).key[:, 0]
    Array([7., 7., 7., 6., 5., 4., 3., 2., 1., 1., 0.], dtype=float32)
    """
    return cls(_deberta_table(buckets, max_distance), None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DistanceBias(ByDistance):
  """Adds a trained number to the logit, after the scale: one for each distance j - i.

  Attributes:
    table: `[R]`, shared by the heads, or `[R, N]`.
    beyond, left: how distances select rows, as in `RelativePositions`; "zero" adds
      nothing to pairs beyond the table.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import attention_weights
  >>> q = jnp.ones((3, 1, 8))
  >>> previous = DistanceBias(jnp.array([0.0, 9.0, 0.0, 0.0, 0.0]))
  >>> attention_weights(q, q, relations=previous)[0, 2].round(2)
  Array([0., 1., 0.], dtype=float32)
  """

  table: Leaf

  @classmethod
  def t5(
    cls, buckets: ArrayLike, bidirectional: bool = True, max_distance: int = 128
  ) -> "DistanceBias":
    """Returns T5's relative position bias, with a table row per distance.

    Each small distance has a bucket of its own, and other buckets grow with the
    logarithm of the distance. The bias is constant from `max_distance` on. T5 uses no
    scale: give the operator `scale=1.0`. Raffel et al. 2020, section 2.1.

    Args:
      buckets: `[num_buckets, N]`, or `[num_buckets]`; T5X stores the transpose.
      bidirectional: whether the second half of the buckets is for later keys, as in
        encoders. Otherwise, as in decoders, later keys share the bucket of distance 0.
      max_distance: the distance from which on all keys share the last bucket.

    >>> import jax.numpy as jnp
    >>> DistanceBias.t5(jnp.arange(8.0), bidirectional=True, max_distance=6).table
    Array([3., 3., 3., 2., 2., 1., 0., 5., 6., 6., 7., 7., 7.], dtype=float32)
    """
    buckets = jnp.asarray(buckets)
    number = len(buckets) // 2 if bidirectional else len(buckets)
    exact = number // 2  # buckets that hold one distance
    if not 0 < exact < max_distance:
      raise ValueError(
        f"buckets has {len(buckets)} rows and max_distance is {max_distance}; want at "
        f"least {4 if bidirectional else 2} rows, and a max_distance above {exact}"
      )
    distances = np.arange(max_distance + 1)
    steps = _logarithms(distances, exact, max_distance) * (number - exact)
    growing = exact + np.floor(steps + 1e-9).astype(int)  # 2.999... means 3
    growing = np.minimum(growing, number - 1)
    rows = np.where(distances < exact, distances, growing)
    before = rows[::-1]
    if not bidirectional:
      return cls(buckets[before], left=max_distance)
    after = rows[1:] + number
    return cls(buckets[np.concatenate([before, after])], left=max_distance)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearBias(Relation):
  """Adds ALiBi's -slope abs(j - i) to the logit, after the scale.

  Press et al. 2022, section 3. No distance is clipped.

  Attributes:
    slopes: `[N]`, one per head; `LinearBias.alibi` returns the slopes of the paper.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import dot_product_attention
  >>> q, relations = jnp.ones((2, 10, 8, 64)), LinearBias.alibi(8)
  >>> dot_product_attention(q, q, q, relations=relations, is_causal=True).shape
  (2, 10, 8, 64)
  """

  slopes: Leaf

  @classmethod
  def alibi(cls, num_heads: int) -> "LinearBias":
    """Returns the paper's slopes: a geometric sequence that ends at 2**-8.

    Its first slope and its ratio are 2**(-8 / N). If N is not a power of two, let M be
    the power of two below it. The first M heads have the slopes for M heads. The others
    have every second slope of the sequence for 2 M heads, as in the authors' code.

    >>> LinearBias.alibi(3).slopes
    Array([0.0625    , 0.00390625, 0.25      ], dtype=float32)
    """
    if num_heads < 1:
      raise ValueError(f"num_heads is {num_heads}; want one or more")
    power = 2 ** int(math.log2(num_heads))
    steps = np.arange(1, power + 1)
    between = np.arange(num_heads - power) + 0.5
    steps = np.concatenate([steps, between])
    return cls(jnp.asarray(2 ** (-8 * steps / power)))

  def checked(self, name: str, sizes: Sizes) -> Relation:
    slopes = check_array(f"{name}.slopes", self.slopes, jnp.floating, (sizes.heads,))
    return dataclasses.replace(self, slopes=slopes.astype(sizes.accumulation_dtype))

  def logits(self, queries: Tokens, keys: Tokens) -> Float[Array, "#B N T S"]:
    distance_BTS = distances(queries.positions, keys.positions)
    size_BTS = jnp.abs(distance_BTS.astype(self.slopes.dtype))
    return -self.slopes[None, :, None, None] * size_BTS[:, None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContentBias(ByDistance):
  """Adds Transformer-XL's content-position term p_i . w[row(j - i)], not scaled.

  It multiplies a second query vector p_i by a table row, selected by distance as in
  `RelativePositions`. For Dai et al. 2019, section 3.3, the operator's query is q + u,
  p is (q + v) times the scale, and the rows are the projected sinusoids by distance.

  Attributes:
    query: p, `[B, T, N, P]` (or `[T, N, P]` without a batch), in the query's dtype. It
      is not scaled: multiply it by the scale first.
    table: `[R, P]`, shared by the heads, or `[R, N, P]`.
    beyond, left: as in `RelativePositions`; "zero" adds nothing to pairs beyond the
      table.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import dot_product_attention
  >>> q, p = jnp.ones((2, 10, 8, 64)), jnp.ones((2, 10, 8, 16))
  >>> relations = ContentBias(p, jnp.ones((7, 16)), beyond="zero")
  >>> dot_product_attention(q, q, q, relations=relations).shape
  (2, 10, 8, 64)
  """

  query: Leaf
  table: Leaf

  query_fields = ("query",)

  def row_shape(self, sizes: Sizes) -> tuple[int, ...]:
    return jnp.shape(self.query)[-1:]

  def checked(self, name: str, sizes: Sizes) -> Relation:
    relation = super().checked(name, sizes)
    shape = (*sizes.batch, sizes.queries, sizes.heads, *self.row_shape(sizes))
    query = check_array(f"{name}.query", self.query, jnp.floating, shape)
    if query.dtype != sizes.dtype:
      raise ValueError(
        f"{name}.query has dtype {query.dtype}; want the query's, {sizes.dtype}"
      )
    return dataclasses.replace(relation, query=with_one_batch_axis(query, 3))

  def content(
    self, queries: Tokens, keys: Tokens
  ) -> tuple[Float[Array, "B T N P"], Float[Array, "R #N P"]]:
    return self.query, self.table


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyBias(ByDistance):
  """Adds DeBERTa's position-to-content term k_j . w[row(j - i)], times the scale.

  It multiplies the key by a table row, selected by distance as in `RelativePositions`.
  He et al. 2021, section 3.1, equation 4, where the scale is (3 H)**-0.5.

  Attributes:
    table: `[R, H]`, shared by the heads, or `[R, N, H]`, one per query head.
    beyond, left: as in `RelativePositions`; "zero" adds nothing to pairs beyond the
      table.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import dot_product_attention
  >>> q, table = jnp.ones((2, 10, 8, 64)), jnp.ones((7, 64))
  >>> relations = RelativePositions(key=table, value=None), KeyBias(table)
  >>> dot_product_attention(q, q, q, relations=relations, scale=(3 * 64) ** -0.5).shape
  (2, 10, 8, 64)
  """

  table: Leaf

  @classmethod
  def deberta(cls, buckets: ArrayLike, max_distance: int = 512) -> "KeyBias":
    """Returns DeBERTa's position-to-content term from buckets.

    The arguments are as in `RelativePositions.deberta`. A pair has the same bucket in
    both terms, as in the authors' code.
    """
    return cls(_deberta_table(buckets, max_distance))

  is_scaled = True
  is_by_key = True

  def row_shape(self, sizes: Sizes) -> tuple[int, ...]:
    return (sizes.width,)

  def content(
    self, queries: Tokens, keys: Tokens
  ) -> tuple[Float[Array, "B S N H"], Float[Array, "R #N H"]]:
    group = queries.vectors.shape[2] // keys.vectors.shape[2]
    return jnp.repeat(keys.vectors, group, axis=2), self.table

  def with_keys(self, queries: Tokens, keys: Tokens) -> "_ProjectedKeys":
    numbers = self.project(queries, keys)
    return _ProjectedKeys(numbers, beyond=self.beyond, left=self.left)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _ProjectedKeys(KeyBias):
  """Holds the products of keys and table rows, [B, N, S, R], as its table.

  So they are computed once for all blocks of queries.
  """

  @property
  def num_rows(self) -> int:
    return self.table.shape[-1]

  def project(self, queries: Tokens, keys: Tokens) -> Float[Array, "B N S R"]:
    return self.table


def _deberta_table(buckets: ArrayLike, max_distance: int) -> Float[Array, "R ..."]:
  """Makes a table with a row for each distance from -max_distance to max_distance.

  Each row is a copy of a row of `buckets`. As in the authors' code, the row of distance
  j - i has the index `make_log_bucket_position(i - j)` + len(buckets) / 2 in `buckets`,
  clipped to the rows that exist.
  """
  buckets = jnp.asarray(buckets)
  num_rows, exact = len(buckets), len(buckets) // 4
  if num_rows % 4 or not 0 < exact < max_distance - 1:
    raise ValueError(
      f"buckets has {num_rows} rows and max_distance is {max_distance}; want a "
      f"multiple of 4 rows, and a max_distance above {exact + 1}"
    )
  distances = np.arange(max_distance, -max_distance - 1, -1)
  sizes = abs(distances)
  steps = _logarithms(sizes, exact, max_distance - 1) * (exact - 1)
  growing = exact + np.ceil(steps - 1e-9).astype(int)  # 3.000...1 means 3
  growing *= np.sign(distances)
  rows = np.where(sizes <= exact, distances, growing) + num_rows // 2
  return buckets[rows.clip(0, num_rows - 1)]


def _logarithms(distances: np.ndarray, exact: int, farthest: int) -> np.ndarray:
  """Returns logarithms of distances, scaled to 0 up to `exact` and 1 at `farthest`."""
  ratios = np.maximum(distances, exact) / exact
  return np.log(ratios) / math.log(farthest / exact)
