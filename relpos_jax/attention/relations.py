"""Relations between query i and key j: frozen pytrees that define a_ij, or a term of
the logits.

Positions without a table, turned into queries and keys before the call, are in
`rotary.py`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from relpos_jax.typing import Array, ArrayLike, Beyond, Float, Int, Integer, Leaf


class ByDistance:
  """A relation with table rows by signed distance j - i: the fields `beyond` and `left`."""

  beyond: Beyond
  left: int | None

  @property
  def reach(self) -> tuple[int, int]:
    """Returns the distances of the first row, to the left, and of the last one, to the right."""
    num_rows = len(next(iter(tables(self).values())))
    left = num_rows // 2 if self.left is None else self.left
    return left, num_rows - 1 - left

  def labels(
    self, query_positions: Int[Array, "*#B T"], key_positions: Int[Array, "*#B S"]
  ) -> Int[Array, "*#B T S"]:
    """Returns the table row of every pair; -1 is "no relation", the zero vector."""
    left, right = self.reach
    distance = key_positions[..., None, :] - query_positions[..., :, None]
    nearest = jnp.clip(distance, -left, right)
    rows = nearest + left  # the sum of the distance and left might not fit in 32 bits
    return rows if self.beyond == "clip" else jnp.where(distance == nearest, rows, -1)


def _deberta_table(buckets: ArrayLike, max_distance: int) -> Float[Array, "R ..."]:
  """Returns DeBERTa's row for each distance j - i from -max_distance to max_distance.

  `make_log_bucket_position` of the authors, of the distance i - j, and clipped.
  """
  buckets = jnp.asarray(buckets)
  num_rows, exact = len(buckets), len(buckets) // 4
  if num_rows % 4 or not 0 < exact < max_distance - 1:
    raise ValueError(
      f"buckets has {num_rows} rows and max_distance is {max_distance}; want a multiple of 4 rows, "
      f"and a max_distance above {exact + 1}"
    )
  distances = np.arange(max_distance, -max_distance - 1, -1)
  far = np.maximum(abs(distances), exact) / exact
  growing = np.log(far) / math.log((max_distance - 1) / exact) * (exact - 1)
  growing = exact + np.ceil(growing - 1e-9).astype(int)  # 3.000...1 is 3
  rows = np.where(abs(distances) <= exact, distances, np.sign(distances) * growing)
  return buckets[np.clip(rows + num_rows // 2, 0, num_rows - 1)]


@dataclasses.dataclass(frozen=True)
class RelativePositions(ByDistance):
  """The signed distance j - i from query i to key j, with a vector for each in a table.

  a_ij is row `clip(j - i, -left, right) + left` of a table of R = left + 1 + right
  rows. With the default symmetric table, R = 2k + 1, row 0 is "k or more to the left",
  row k is "same position" and row 2k is "k or more to the right". Shaw et al. 2018,
  section 3.2.

  Attributes:
    key, value: tables of aK and aV, `[R, H]` shared by the heads or `[R, N, H]` one per
      head; None for no such term.
    beyond: "clip" gives a pair beyond the table the nearest end row; "zero" gives it no
      term (Huang et al. 2018, Music Transformer).
    left: the number of rows before "same position". None: R must be odd, and left is (R
      - 1) / 2.

  >>> import jax.numpy as jnp
  >>> table = jnp.ones((2 * 3 + 1, 64))
  >>> relations = RelativePositions(key=table, value=None)
  >>> relations.labels(jnp.arange(1), jnp.arange(10))
  Array([[3, 4, 5, 6, 6, 6, 6, 6, 6, 6]], dtype=int32)
  """

  key: Leaf | None
  value: Leaf | None
  beyond: Beyond = dataclasses.field(default="clip", metadata={"static": True})
  left: int | None = dataclasses.field(default=None, metadata={"static": True})

  @classmethod
  def deberta(cls, buckets: ArrayLike, max_distance: int = 512) -> "RelativePositions":
    """Returns DeBERTa's content-to-position term, with a row for each distance it tells
    apart.

    A row for each small distance, then rows that grow with the logarithm of the
    distance, as in DeBERTa v2 and v3; `KeyBias.deberta` is the other term, and the
    scale is (3 H)**-0.5.

    Args:
      buckets: `[R, N, H]` or `[R, H]`, the projected embeddings in the order of the
        authors' code: row 0 is for keys far after the query. R is twice their
        `position_buckets`.
      max_distance: their `max_relative_positions`.

    >>> import jax.numpy as jnp
    >>> RelativePositions.deberta(jnp.arange(8.0)[:, None], max_distance=5).key[:, 0]
    Array([7., 7., 7., 6., 5., 4., 3., 2., 1., 1., 0.], dtype=float32)
    """
    return cls(_deberta_table(buckets, max_distance), None)


@dataclasses.dataclass(frozen=True)
class EdgeLabels:
  """The label of the edge from i to j in a directed graph, with a vector for each in a
  table.

  a_ij is row `labels[i, j]` of the table. Shaw et al. 2018, section 3.1: relative
  positions are the special case of a linear graph whose labels are clipped distances.

  Attributes:
    labels: integers `[B, T, S]`, or `[T, S]` for all of the batch; -1 is "no relation",
      the zero vector. Other labels out of range raise if they are concrete. Traced ones
      are clamped, but in a function that is traced under `jax.debug_nans(True)`, or
      with JAX_DEBUG_NANS=1, they make NaN, at which JAX raises.
    key, value: tables of aK and aV, as in `RelativePositions`: `[E, H]`, `[E, N, H]` or
      None.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import dot_product_attention
  >>> father, mother = 0, 1
  >>> labels = jnp.array([[-1, father], [mother, -1]])
  >>> q, table = jnp.ones((2, 8, 64)), jnp.ones((2, 64))
  >>> dot_product_attention(q, q, q, relations=EdgeLabels(labels, table, table)).shape
  (2, 8, 64)
  """

  labels: Leaf
  key: Leaf | None
  value: Leaf | None


@dataclasses.dataclass(frozen=True)
class EdgeFeatures:
  """Features of the edge from i to j, mapped to a vector by a trained kernel.

  a_ij is `features[i, j] @ kernel`. With one-hot features it is `EdgeLabels`.

  Attributes:
    features: `[B, T, S, F]`, or `[T, S, F]` for all of the batch.
    key, value: kernels of aK and aV: `[F, H]`, `[F, N, H]` or None.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import dot_product_attention
  >>> q, kernel = jnp.ones((2, 8, 64)), jnp.ones((1, 64))
  >>> bond_lengths = jnp.array([[0.0, 1.4], [1.4, 0.0]])[..., None]
  >>> dot_product_attention(q, q, q, relations=EdgeFeatures(bond_lengths, kernel, None)).shape
  (2, 8, 64)
  """

  features: Leaf
  key: Leaf | None
  value: Leaf | None


@dataclasses.dataclass(frozen=True)
class DistanceBias(ByDistance):
  """A number for each signed distance j - i, added to the logit and not multiplied by
  the scale.

  Attributes:
    table: `[R]`, shared by the heads, or `[R, N]`.
    beyond, left: as in `RelativePositions`, where pairs find their rows; "zero" adds
      nothing to pairs beyond the table.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import attention_weights
  >>> q = jnp.ones((3, 1, 8))
  >>> previous = DistanceBias(jnp.array([0.0, 9.0, 0.0, 0.0, 0.0]))
  >>> attention_weights(q, q, relations=previous)[0, 2].round(2)
  Array([0., 1., 0.], dtype=float32)
  """

  table: Leaf
  beyond: Beyond = dataclasses.field(default="clip", metadata={"static": True})
  left: int | None = dataclasses.field(default=None, metadata={"static": True})

  @classmethod
  def t5(
    cls, buckets: ArrayLike, bidirectional: bool = True, max_distance: int = 128
  ) -> "DistanceBias":
    """Returns T5's bias, with a row for each distance up to `max_distance`, where it is
    constant.

    A bucket for each small distance, then buckets that grow with the logarithm of the
    distance. T5 uses no scale: give the operator `scale=1.0`. Raffel et al. 2020,
    section 2.1.

    Args:
      buckets: `[num_buckets, N]`, or `[num_buckets]`; T5X stores the transpose.
      bidirectional: whether later keys have their own half of the buckets, the second
        (encoders); otherwise they share the bucket of distance 0 (decoders).
      max_distance: the distance from which on all keys share the last bucket.

    >>> import jax.numpy as jnp
    >>> DistanceBias.t5(jnp.arange(8.0), bidirectional=True, max_distance=6).table
    Array([3., 3., 3., 2., 2., 1., 0., 5., 6., 6., 7., 7., 7.], dtype=float32)
    """
    buckets = jnp.asarray(buckets)
    number = len(buckets) // 2 if bidirectional else len(buckets)
    exact = number // 2  # buckets of one distance
    if not 0 < exact < max_distance:
      raise ValueError(
        f"buckets has {len(buckets)} rows and max_distance is {max_distance}; want at least "
        f"{4 if bidirectional else 2} rows, and a max_distance above {exact}"
      )
    distances = np.arange(max_distance + 1)
    logarithm = np.log(np.maximum(distances, exact) / exact) / math.log(
      max_distance / exact
    )
    growing = exact + np.floor(logarithm * (number - exact) + 1e-9).astype(
      int
    )  # 2.999... is 3
    before = np.where(distances < exact, distances, np.minimum(growing, number - 1))
    after = before[1:] + number if bidirectional else before[:0]
    return cls(buckets[np.concatenate([before[::-1], after])], left=max_distance)


@dataclasses.dataclass(frozen=True)
class LinearBias:
  """The distance times a negative slope, -slope abs(j - i): ALiBi, of any reach and not
  scaled.

  Press et al. 2022, section 3. The term is added to the logit after the scale.

  Attributes:
    slopes: `[N]`, one per head; `LinearBias.alibi` has the paper's.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import dot_product_attention
  >>> q = jnp.ones((2, 10, 8, 64))
  >>> dot_product_attention(q, q, q, relations=LinearBias.alibi(8), is_causal=True).shape
  (2, 10, 8, 64)
  """

  slopes: Leaf

  @classmethod
  def alibi(cls, num_heads: int) -> "LinearBias":
    """Returns the paper's slopes: a geometric sequence that ends at 2**-8.

    It starts at its own ratio, 2**(-8 / N). If N is no power of two, the heads that
    exceed one take every second slope of the sequence for twice that power, as in the
    authors' code.

    >>> LinearBias.alibi(3).slopes
    Array([0.0625    , 0.00390625, 0.25      ], dtype=float32)
    """
    power = 2 ** int(math.log2(num_heads))
    steps = np.concatenate(
      [np.arange(1, power + 1), np.arange(num_heads - power) + 0.5]
    )
    return cls(jnp.asarray(2 ** (-8 * steps / power)))


@dataclasses.dataclass(frozen=True)
class ContentBias(ByDistance):
  """The product p_i . w[row(j - i)] of another query vector and a table; not scaled.

  Pairs find their rows as in `RelativePositions`. Transformer-XL (Dai et al. 2019,
  section 3.3): its q + u is the operator's query, (q + v) times the scale is p, and the
  rows are its projected sinusoids by distance.

  Attributes:
    query: p, `[B, T, N, P]` (or `[T, N, P]` if the operator's query has no batch), in
      the query's dtype. Multiply it by the scale.
    table: `[R, P]`, shared by the heads, or `[R, N, P]`.
    beyond, left: as in `RelativePositions`; "zero" adds nothing to pairs beyond the
      table.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import dot_product_attention
  >>> q, p, table = jnp.ones((2, 10, 8, 64)), jnp.ones((2, 10, 8, 16)), jnp.ones((7, 16))
  >>> dot_product_attention(q, q, q, relations=ContentBias(p, table, beyond="zero")).shape
  (2, 10, 8, 64)
  """

  query: Leaf
  table: Leaf
  beyond: Beyond = dataclasses.field(default="clip", metadata={"static": True})
  left: int | None = dataclasses.field(default=None, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class KeyBias(ByDistance):
  """The product k_j . w[row(j - i)] of the key and a table, multiplied by the scale.

  Pairs find their rows as in `RelativePositions`. DeBERTa's position-to-content term
  (He et al. 2021, section 3.1, equation 4), whose scale is (3 H)**-0.5.

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
  beyond: Beyond = dataclasses.field(default="clip", metadata={"static": True})
  left: int | None = dataclasses.field(default=None, metadata={"static": True})

  @classmethod
  def deberta(cls, buckets: ArrayLike, max_distance: int = 512) -> "KeyBias":
    """Returns DeBERTa's position-to-content term, of buckets as in
    `RelativePositions.deberta`.

    A pair has the same row of both, as in the authors' code.
    """
    return cls(_deberta_table(buckets, max_distance))


@dataclasses.dataclass(frozen=True)
class LabelBias:
  """A number for the label of each pair, added to the logit and not multiplied by the
  scale.

  Swin (Liu et al. 2021, section 3.2) labels a pair of patches by its two offsets,
  Graphormer (Ying et al. 2021, section 3.1.2) a pair of nodes by their distance in the
  graph.

  Attributes:
    labels: integers `[B, T, S]`, or `[T, S]` for all of the batch, as in `EdgeLabels`;
      -1 adds nothing.
    table: `[E]`, shared by the heads, or `[E, N]`.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import attention_weights
  >>> q, labels = jnp.ones((2, 1, 8)), jnp.array([[-1, 0], [0, 1]])
  >>> attention_weights(q, q, relations=LabelBias(labels, jnp.array([9.0, 0.0])))[0].round(2)
  Array([[0., 1.],
         [1., 0.]], dtype=float32)
  """

  labels: Leaf
  table: Leaf


@dataclasses.dataclass(frozen=True)
class FunctionBias:
  """Any function of a query's and a key's positions and data, added to the logit and
  not scaled.

  Adds `function(params, i, j, x_i, y_j, z_ij)` to the logit of query i and key j: a
  number, or numbers `[N]`, one per head. It is written for one pair, and mapped over
  all pairs with `jax.vmap`. Its gradients are exact, for the parameters and for the
  data, and the same in every run.

  Attributes:
    function: takes the parameters, the positions i and j (integers), and the data of
      the query, the key and the pair, each None if there are none.
    params: a tree of arrays.
    of_query: a tree of arrays `[B, T, ...]`; for all of the batch `[1, T, ...]`, with a
      1 for each batch axis, or `[T, ...]`. A shape that fits both, such as `[T, T]` for
      B = T, raises ValueError: give shared data as `x[None]`, and map a call with data
      of each sequence over them by `jax.vmap`.
    of_key: a tree of arrays `[B, S, ...]`, `[1, S, ...]` or `[S, ...]`.
    of_pair: a tree of arrays `[B, T, S, ...]`, `[1, T, S, ...]` or `[T, S, ...]`.

  KERPLE (Chi et al. 2022, equation 6) has a logarithm of the distance with two
  parameters:

  >>> import jax.numpy as jnp
  >>> from relpos_jax import dot_product_attention
  >>> def kerple(params, i, j, *_):
  ...   return -params["a"] * jnp.log1p(params["b"] * jnp.abs(i - j))
  >>> q, params = jnp.ones((10, 8, 64)), dict(a=jnp.ones(8), b=jnp.ones(8))
  >>> dot_product_attention(q, q, q, relations=FunctionBias(kerple, params)).shape
  (10, 8, 64)
  """

  function: Callable[..., Any] = dataclasses.field(metadata={"static": True})
  params: Any = None
  of_query: Any = None
  of_key: Any = None
  of_pair: Any = None


Vectors = (
  RelativePositions | EdgeLabels | EdgeFeatures
)  # with a_ij for keys, values or both
Numbers = (
  DistanceBias | LabelBias
)  # whose tables have a number in each row, and no vector
# Those whose term of the logits is not scaled.
Unscaled = Numbers | LinearBias | ContentBias | FunctionBias
Relation = Vectors | Unscaled | KeyBias
Relations = Relation | tuple[Relation, ...]
for _kind in get_args(Relation):
  jax.tree_util.register_dataclass(_kind)


def rows_of(relation: EdgeLabels | LabelBias) -> Int[Array, "..."]:
  """Returns labels of any integer type as rows of their table: -1 for none, and clamped."""
  return clamp(relation.labels, len(next(iter(tables(relation).values()))))


def clamp(labels: Integer[Array, "..."], num_rows: int) -> Int[Array, "..."]:
  """Returns labels of any integer type as int32, from -1 to num_rows - 1."""
  wide = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
  return jnp.clip(wide, -1, num_rows - 1).astype(jnp.int32)


def nan_if_clamped(x: Array, labels: Integer[Array, "..."], num_rows: int) -> Array:
  """Returns x; under `jax.debug_nans`, NaN if traced labels are clamped.

  Otherwise it costs nothing.
  """
  if not jax.config.jax_debug_nans or not isinstance(labels, jax.core.Tracer):
    return x
  return jnp.where(jnp.any(clamp(labels, num_rows) != labels), jnp.nan, x)


def tables(relation: Relation) -> dict[str, Any]:
  """Returns the tables or kernels of a relation, by the names of their fields."""
  fields = ((name, getattr(relation, name, None)) for name in ("key", "value", "table"))
  return {name: table for name, table in fields if table is not None}
