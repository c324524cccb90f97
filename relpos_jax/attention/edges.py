"""Attention over a list of edges: time and memory grow with the edges, not with [T, S]."""

import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.attention.arrays import as_array, check_array, check_range, describe
from relpos_jax.attention.inputs import check_numbers, check_tensors
from relpos_jax.attention.labels import EdgeLabels, clamp, nan_if_clamped
from relpos_jax.attention.partitioned import with_automatic_axes
from relpos_jax.attention.relation import Sizes
from relpos_jax.attention.relations import EdgeFeatures
from relpos_jax.typing import Array, ArrayLike, Bool, Float, Int


def edge_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  senders: ArrayLike,
  receivers: ArrayLike,
  *,
  labels: EdgeLabels | None = None,
  features: EdgeFeatures | None = None,
  scale: ArrayLike | None = None,
  dropout_rate: float = 0.0,
  dropout_key: ArrayLike | None = None,
) -> Array:
  r"""Computes the attention of every node to the senders of the edges it receives.

  $$e_{ij} = s\, q_i \cdot (k_j + a^K_{ij})$$

  $$z_i = \sum_{j \to i} \mathrm{softmax}_j(e_{ij}) (v_j + a^V_{ij})$$

  Shaw et al. 2018, section 3.1; pairs without an edge are hidden. The receiver is the
  query i, the sender the key j. Several edges may join a pair: its a_ij adds the row of
  each distinct label and the mean of its edges' features times the kernel. Repeating an
  edge changes only that mean. A node sees itself only if it has an edge to itself. A
  node that receives no edge gets zero output and zero gradient. Equals
  `dot_product_attention` with the relations and mask of `pair_features`.

  Takes O(M log M) comparisons, and O(M N H) memory and arithmetic for M edges.

  Args:
    query: `[B, T, N, H]`, or `[T, N, H]` without a batch (then B is absent everywhere
      below).
    key: `[B, S, K, H]`; N is a multiple of K. T = S for a graph's attention to itself.
    value: `[B, S, K, V]`, of any width V; value tables are as wide.
    senders: integers `[B, M]`, rows of key and value; -1 is padding.
    receivers: integers `[B, M]`, rows of query; -1 is padding. Nodes out of range raise
      if they are concrete and are padding if they are traced.
    labels: `EdgeLabels(labels, key, value)` with labels `[B, M]`; -1 is an edge without
      label, whose sender is still seen. Labels out of range are as in the operator.
    features: `EdgeFeatures(features, key, value)` with features `[B, M, F]`.
    scale: factor of the content and of the relative term, `H**-0.5` by default.
    dropout_rate: the share of pairs dropped, for v_j and aV_ij alike.
    dropout_key: `jax.random.key`; needed if the rate is positive.

  Returns:
    `[B, T, N, V]`, in the value's dtype. Softmax and sums are in float32, or in float64
    for float64 inputs.

  >>> father, mother = 0, 1
  >>> labels = EdgeLabels(jnp.array([father, mother]), jnp.ones((2, 64)), None)
  >>> q = k = v = jnp.ones((3, 8, 64))
  >>> senders, receivers = jnp.array([0, 1]), jnp.array([1, 0])
  >>> edge_attention(q, k, v, senders, receivers, labels=labels)[:, 0, 0]  # node 2 has no edge
  Array([1., 1., 0.], dtype=float32)
  """
  tensors = query, key, value, senders, receivers
  options = labels, features, scale, dropout_rate, dropout_key
  return with_automatic_axes(_edge_attention, query, *tensors, *options)


def _edge_attention(
  query,
  key,
  value,
  senders,
  receivers,
  labels,
  features,
  scale,
  dropout_rate,
  dropout_key,
):
  query, key, value = check_tensors(query, key, value)
  scale = query.shape[-1] ** -0.5 if scale is None else scale
  check_numbers(scale, dropout_rate, dropout_key)
  given = senders, receivers, getattr(labels, "labels", None)
  # Concrete edges are sorted now: XLA would take minutes to fold the sort of constants.
  known = not any(isinstance(x, jax.core.Tracer) for x in given)
  with jax.ensure_compile_time_eval() if known else contextlib.nullcontext():
    senders = as_array("senders", senders)
    shape = *query.shape[:-3], *senders.shape[-1:]
    check_array("senders", senders, jnp.integer, shape)
    receivers = check_array("receivers", receivers, jnp.integer, shape)
    check_range("senders", senders, key.shape[-3])
    check_range("receivers", receivers, query.shape[-3])
    *batch, num_queries, heads, width = query.shape
    sizes = Sizes(
      tuple(batch),
      num_queries,
      key.shape[-3],
      heads,
      width,
      value.shape[-1],
      query.dtype,
    )
    if labels is not None:
      _check_kind("labels", labels, EdgeLabels)
      labels = labels.with_checked_tables("labels", sizes)
      labels = labels.with_checked_labels("labels", shape)
    if not query.size or not key.size or not senders.size:
      return jnp.zeros((*query.shape[:-1], value.shape[-1]), value.dtype)
    edges = _sorted(senders, receivers, labels, query.shape[-3], key.shape[-3])
  if features is not None:
    _check_kind("features", features, EdgeFeatures)
    features = features.with_checked_tables("features", sizes)
    features = features.with_checked_features("features", shape)
  wide, heads = jnp.promote_types(query.dtype, jnp.float32), query.shape[-2]

  def nodes(x):
    return x.reshape(-1, *x.shape[-2:]).repeat(heads // x.shape[-2], 1)

  query_MNH = _at(nodes(query), edges.receivers).astype(wide)
  logits = jnp.sum(query_MNH * _at(nodes(key), edges.senders), -1)
  for a_MNH in _vectors("key", edges, labels, features, wide):
    logits += edges.of_pair(jnp.sum(query_MNH * a_MNH, -1))
  num_queries = query.size // (heads * query.shape[-1])
  logits *= jnp.asarray(scale, wide)
  # Softmax over each receiver's pairs; every edge of a pair gets the pair's weight.
  highest = jax.ops.segment_max(
    jax.lax.stop_gradient(logits), edges.receivers, num_queries, indices_are_sorted=True
  )
  powers = jnp.exp(
    jnp.where(edges.is_edge, logits - _at(highest, edges.receivers), -jnp.inf)
  )
  totals = _sum(jnp.where(edges.is_first, powers, 0), edges.receivers, num_queries)
  weights = powers / _at(jnp.where(totals > 0, totals, 1), edges.receivers)
  if dropout_rate:
    kept = jax.random.bernoulli(dropout_key, 1 - dropout_rate, weights.shape)[
      edges.pair
    ]
    weights = jnp.where(kept, weights / (1 - dropout_rate), 0)
  messages = jnp.where(edges.is_first, weights, 0)[..., None] * _at(
    nodes(value), edges.senders
  )
  for a_MNH in _vectors("value", edges, labels, features, wide):
    messages += weights[..., None] * a_MNH
  output = _sum(messages, edges.receivers, num_queries)
  return output.reshape(*query.shape[:-1], value.shape[-1]).astype(value.dtype)


def _check_kind(name: str, relation: object, kind: type) -> None:
  if not isinstance(relation, kind):
    raise ValueError(f"{name} is {describe(relation)}; want {kind.__name__} or None")


def pair_features(
  senders: Int[Array, "*B M"],
  receivers: Int[Array, "*B M"],
  labels: Int[Array, "*B M"],
  features: Float[Array, "*B M F"],
  *,
  num_labels: int,
  num_nodes: int,
) -> tuple[Float[Array, "*B T T R"], Bool[Array, "*B T T"]]:
  """Returns the features of every pair of nodes, for `EdgeFeatures`, and the mask.

  The features of a pair are the multi-hot vector of its labels and the mean of its
  edges' features, so the kernels are the tables and kernels of `edge_attention`,
  concatenated. Takes O(T T (E + F)) memory. Labels of -1, and features of width 0,
  stand for none. Other labels out of range are clamped; traced ones may make NaN, as in
  `EdgeLabels`.

  >>> senders, receivers, labels = jnp.array([[0, 0], [1, 1], [0, 2]])
  >>> features, mask = pair_features(
  ...   senders, receivers, labels, jnp.zeros((2, 0)), num_labels=3, num_nodes=2)
  >>> features[1, 0], mask.astype(int)
  (Array([1., 0., 1.], dtype=float32), Array([[0, 0],
         [1, 0]], dtype=int32))
  """
  if senders.ndim > 1:
    one = functools.partial(pair_features, num_labels=num_labels, num_nodes=num_nodes)
    return jax.vmap(one)(senders, receivers, labels, features)
  mask = _edge_mask(senders, receivers, num_nodes, num_nodes)
  pair = jnp.where(mask, receivers, num_nodes), jnp.where(mask, senders, num_nodes)
  counts = jnp.zeros((num_nodes, num_nodes)).at[pair].add(1, mode="drop")
  row = clamp(labels, num_labels)
  row = jnp.where(row < 0, num_labels, row)
  one_hot = jnp.zeros((*counts.shape, num_labels)).at[*pair, row].set(1, mode="drop")
  empty = jnp.zeros((*counts.shape, features.shape[-1]), features.dtype)
  sums = empty.at[pair].add(features, mode="drop")
  means = sums / jnp.maximum(counts, 1)[..., None].astype(sums.dtype)
  found = jnp.concatenate([one_hot, means], -1)
  return nan_if_clamped(found, labels, num_labels), counts > 0


def sum_over_pairs(
  senders: Int[Array, "*B M"],
  receivers: Int[Array, "*B M"],
  x: Float[Array, "*B M F"],
  *,
  num_nodes: int,
) -> Float[Array, "*B M F"]:
  """Adds up x, for every edge, over the edges that join the same pair.

  Takes O(M log M) comparisons. The result at padding is arbitrary.
  """
  if senders.ndim > 1:  # sorted by graph, which needs nothing of other devices
    one = functools.partial(sum_over_pairs, num_nodes=num_nodes)
    return jax.vmap(one)(senders, receivers, x)
  edges = _sorted(senders, receivers, None, num_nodes, num_nodes)
  return jnp.zeros_like(x).at[edges.order].set(edges.of_pair(x[edges.order]))


class _Edges(NamedTuple):
  """The edges of all graphs, sorted by receiver, sender and label; nodes are rows of the batch."""

  order: Int[Array, " M"]  # the index of each edge before sorting
  senders: Int[Array, " M"]
  receivers: Int[Array, " M"]  # out of range for padding, which is last
  labels: Int[Array, " M"]  # -1: none
  pair: Int[Array, " M"]  # the index of the pair that the edge joins
  is_first: Bool[Array, "M 1"]  # of its pair
  is_new: Bool[Array, " M"]  # the first of its pair with its label
  is_edge: Bool[Array, "M 1"]

  def of_pair(self, x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    """Adds up x, for every edge, over the edges of its pair."""
    return _sum(x, self.pair, len(x))[self.pair]


def _sorted(
  senders: Array,
  receivers: Array,
  relation: EdgeLabels | None,
  num_queries: int,
  num_keys: int,
) -> _Edges:
  mask = _edge_mask(senders, receivers, num_queries, num_keys)
  graph = jnp.arange(senders.size // senders.shape[-1]).reshape(*senders.shape[:-1], 1)
  # Out of range, so that padding comes last and is summed nowhere.
  nowhere = max(num_queries, num_keys) * graph.size

  def number(nodes, size):
    return jnp.where(mask, nodes + graph * size, nowhere).reshape(-1)

  senders, receivers = number(senders, num_keys), number(receivers, num_queries)
  labels = jnp.full_like(senders, -1)
  if relation is not None:
    labels = clamp(relation.labels, relation.num_rows).reshape(-1)
  order = jnp.lexsort((labels, senders, receivers))
  senders, receivers, labels = senders[order], receivers[order], labels[order]
  is_first = _changes(senders) | _changes(receivers)
  return _Edges(
    order=order,
    senders=senders,
    receivers=receivers,
    labels=labels,
    pair=jnp.cumsum(is_first) - 1,
    is_first=is_first[:, None],
    is_new=is_first | _changes(labels),
    is_edge=(receivers < nowhere)[:, None],
  )


def _edge_mask(
  senders, receivers, num_queries: int, num_keys: int
) -> Bool[Array, "*B M"]:
  """Returns False for padding."""
  return (
    (senders >= 0) & (senders < num_keys) & (receivers >= 0) & (receivers < num_queries)
  )


def _vectors(name: str, edges: _Edges, labels, features, dtype):
  """Yields the term of each edge in its pair's a_ij, of labels and of features: [M, #N, H]."""

  def with_heads(table):
    return jnp.asarray(table, dtype).reshape(len(table), -1, table.shape[-1])

  table = None if labels is None else getattr(labels, name)
  if table is not None:
    rows = _at(with_heads(table), jnp.maximum(edges.labels, 0))
    yield jnp.where((edges.is_new & (edges.labels >= 0))[:, None, None], rows, 0)
  kernel = None if features is None else getattr(features, name)
  if kernel is not None:
    num_features = features.features.shape[-1]
    x_MF = features.features.reshape(-1, num_features)[edges.order].astype(dtype)
    count_M1 = edges.of_pair(jnp.ones((len(x_MF), 1), dtype))
    yield jnp.einsum("MF,FNH->MNH", x_MF / count_M1, with_heads(kernel))


def _sum(x: Float[Array, "M ..."], segments: Int[Array, " M"], number: int) -> Array:
  return jax.ops.segment_sum(x, segments, number, indices_are_sorted=True)


def _at(x: Float[Array, "X ..."], rows: Int[Array, " M"]) -> Float[Array, "M ..."]:
  """Returns rows of x; an arbitrary one where the index is out of range, at padding."""
  return jnp.take(x, rows, axis=0, mode="clip")


def _changes(x: Int[Array, " M"]) -> Bool[Array, " M"]:
  return jnp.concatenate([jnp.ones(1, bool), x[1:] != x[:-1]])
