"""Attention over a list of edges, with time and memory per edge instead of per pair."""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.attention.arrays import (
  accumulation_dtype,
  check_array,
  check_range,
  describe,
)
from relpos_jax.attention.edge_list import is_edge
from relpos_jax.attention.inputs import call_sizes, check_numbers, check_tensors
from relpos_jax.attention.labels import EdgeLabels, clamp, nan_if_clamped
from relpos_jax.attention.partitioned import with_automatic_axes
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
  bias: ArrayLike | None = None,
  scale: ArrayLike | None = None,
  dropout_rate: float = 0.0,
  dropout_key: ArrayLike | None = None,
) -> Array:
  r"""Computes attention of every node to the senders of its incoming edges.

  $$e_{ij} = s\, q_i \cdot (k_j + a^K_{ij})$$

  $$z_i = \sum_{j \to i} \mathrm{softmax}_j(e_{ij}) (v_j + a^V_{ij})$$

  Shaw et al. 2018, section 3.1. The receiver is the query i, and the sender is the key
  j. Pairs without an edge are masked, and so is a node without an edge to itself. A
  node without incoming edges gets zero output and zero gradient.

  A pair may have several edges. Then a_ij adds the table rows of their distinct labels,
  and the mean of their features times the kernel. So a repeated edge changes only the
  mean. The result equals `dot_product_attention` with the relations and mask of
  `pair_features`.

  Takes O(M log M) comparisons, and O(M N H) memory and arithmetic for M edges.

  Args:
    query: `[B, T, N, H]`, or `[T, N, H]` without a batch. Then no argument has an axis
      B.
    key: `[B, S, K, H]`; N is a multiple of K. In self-attention over a graph, S = T.
    value: `[B, S, K, V]`, with any width V. Value tables have the same width.
    senders: integers `[B, M]`, indices of keys; -1 is padding.
    receivers: integers `[B, M]`, indices of queries; -1 is padding. Indices out of
      range raise if they are concrete, and are padding if they are traced.
    labels: `EdgeLabels(labels, key, value)` with labels `[B, M]`. -1 is an edge without
      a label: it adds no vector, but the receiver attends to the sender. For labels out
      of range see `EdgeLabels`.
    features: `EdgeFeatures(features, key, value)` with features `[B, M, F]`.
    bias: numbers `[B, M, N]` or `[B, M, 1]`, added to the logits after the scale. A pair
      of several edges has their sum.
    scale: factor of q_i . k_j and of the relative term. Default: `H**-0.5`.
    dropout_rate: the share of pairs to drop, for v_j and aV_ij alike.
    dropout_key: `jax.random.key`; needed if the rate is positive.

  Returns:
    `[B, T, N, V]`, in the value's dtype. Softmax and sums are in float32, or in float64
    for float64 inputs.

  >>> father, mother = 0, 1
  >>> labels = EdgeLabels(jnp.array([father, mother]), jnp.ones((2, 64)), None)
  >>> q = k = v = jnp.ones((3, 8, 64))
  >>> senders, receivers = jnp.array([0, 1]), jnp.array([1, 0])
  >>> output = edge_attention(q, k, v, senders, receivers, labels=labels)
  >>> output[:, 0, 0]  # node 2 has no edge
  Array([1., 1., 0.], dtype=float32)
  """
  tensors = query, key, value, senders, receivers
  options = labels, features, bias, scale, dropout_rate, dropout_key
  return with_automatic_axes(_edge_attention, query, *tensors, *options)


def _edge_attention(
  query,
  key,
  value,
  senders,
  receivers,
  labels,
  features,
  bias,
  scale,
  dropout_rate,
  dropout_key,
):
  query, key, value = check_tensors(query, key, value)
  check_numbers(scale, dropout_rate, dropout_key)
  *nodes, heads, width = query.shape
  if bias is not None:
    edge_shape = jnp.shape(senders)
    shapes = (*edge_shape, heads), (*edge_shape, 1)
    bias = check_array("bias", bias, jnp.floating, *shapes)
  if scale is None:
    scale = width**-0.5
  # Sorts concrete edges now: XLA takes minutes to fold a sort of constants.
  with jax.ensure_compile_time_eval():
    edges = _check_edges(query, key, value, senders, receivers, labels, features)
  shape = *nodes, heads, value.shape[-1]
  if edges is None:
    return jnp.zeros(shape, value.dtype)

  dtype = accumulation_dtype(query.dtype)
  num_queries = math.prod(nodes)
  query_MNH = _take_rows(_flatten_nodes(query, heads), edges.receivers).astype(dtype)
  key_MNH = _take_rows(_flatten_nodes(key, heads), edges.senders)
  logits_MN = jnp.sum(query_MNH * key_MNH, -1)
  for a_MNH in edges.vectors("key", dtype):
    logits_MN += edges.sum_of_pair(jnp.sum(query_MNH * a_MNH, -1))
  logits_MN *= jnp.asarray(scale, dtype)
  if bias is not None:
    bias_MN = bias.reshape(-1, bias.shape[-1])[edges.order].astype(dtype)
    logits_MN += edges.sum_of_pair(bias_MN)
  weights_MN = _softmax(logits_MN, edges, num_queries)
  if dropout_rate:
    keeps = jax.random.bernoulli(dropout_key, 1 - dropout_rate, weights_MN.shape)
    keeps_pair = keeps[edges.pair]
    weights_MN = jnp.where(keeps_pair, weights_MN / (1 - dropout_rate), 0)

  value_MNV = _take_rows(_flatten_nodes(value, heads), edges.senders)
  pair_weights = jnp.where(edges.is_first, weights_MN, 0)
  messages_MNV = pair_weights[..., None] * value_MNV
  for a_MNV in edges.vectors("value", dtype):
    messages_MNV += weights_MN[..., None] * a_MNV
  output = _sum_segments(messages_MNV, edges.receivers, num_queries)
  return output.reshape(shape).astype(value.dtype)


def _check_edges(
  query: Array,
  key: Array,
  value: Array,
  senders: ArrayLike,
  receivers: ArrayLike,
  labels: EdgeLabels | None,
  features: EdgeFeatures | None,
) -> "_Edges | None":
  """Checks and sorts the edges; returns None if there are no queries, keys or edges."""
  sizes = call_sizes(query, key, value)
  shape = *sizes.batch, *jnp.shape(senders)[-1:]
  senders = check_array("senders", senders, jnp.integer, shape)
  receivers = check_array("receivers", receivers, jnp.integer, shape)
  check_range("senders", senders, sizes.keys)
  check_range("receivers", receivers, sizes.queries)
  if labels is not None:
    _check_kind("labels", labels, EdgeLabels)
    labels = labels.with_checked_tables("labels", sizes)
    labels = labels.with_checked_labels("labels", shape)
  if features is not None:
    _check_kind("features", features, EdgeFeatures)
    features = features.with_checked_tables("features", sizes)
    features = features.with_checked_features("features", shape)
  if not query.size or not key.size or not senders.size:
    return None
  edges = _sort(senders, receivers, labels, sizes.queries, sizes.keys)
  return edges._replace(label_tables=labels, features=features)


def _flatten_nodes(x: Float[Array, "*B T K H"], heads: int) -> Float[Array, "BT N H"]:
  """Merges batch and nodes, and repeats the key heads."""
  key_heads, width = x.shape[-2:]
  return x.reshape(-1, key_heads, width).repeat(heads // key_heads, axis=1)


def _softmax(
  logits: Float[Array, "M N"], edges: "_Edges", num_queries: int
) -> Float[Array, "M N"]:
  """Computes the softmax over the pairs of each receiver.

  All edges of a pair get the weight of the pair.
  """
  constants = jax.lax.stop_gradient(logits)
  highest = jax.ops.segment_max(
    constants, edges.receivers, num_queries, indices_are_sorted=True
  )
  is_padding = edges.receivers >= num_queries
  logits = logits - _take_rows(highest, edges.receivers)
  powers = jnp.exp(jnp.where(is_padding[:, None], -jnp.inf, logits))
  pair_powers = jnp.where(edges.is_first, powers, 0)
  totals = _sum_segments(pair_powers, edges.receivers, num_queries)
  totals = jnp.where(totals > 0, totals, 1)
  return powers / _take_rows(totals, edges.receivers)


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

  The features of a pair are the multi-hot vector of its labels, then the mean of its
  edges' features. So the kernels are the concatenated tables and kernels of
  `edge_attention`. For edges without labels use -1, and without features F = 0. Other
  labels out of range are clamped, or NaN as in `EdgeLabels`. Takes O(T T (E + F))
  memory.

  >>> senders, receivers, labels = jnp.array([[0, 0], [1, 1], [0, 2]])
  >>> features, mask = pair_features(
  ...   senders, receivers, labels, jnp.zeros((2, 0)), num_labels=3, num_nodes=2)
  >>> features[1, 0], mask.astype(int)
  (Array([1., 0., 1.], dtype=float32), Array([[0, 0],
         [1, 0]], dtype=int32))
  """
  if senders.ndim > 1:
    per_graph = functools.partial(
      pair_features, num_labels=num_labels, num_nodes=num_nodes
    )
    return jax.vmap(per_graph)(senders, receivers, labels, features)
  is_pair = is_edge(senders, receivers, num_nodes, num_nodes)
  # Moves padding out of range, so that the scatter drops it.
  receivers = jnp.where(is_pair, receivers, num_nodes)
  one_hot = jax.nn.one_hot(clamp(labels, num_labels), num_labels)
  count = jnp.ones((len(labels), 1))
  terms = jnp.concatenate([one_hot, features, count], -1)
  sums = jnp.zeros((num_nodes, num_nodes, terms.shape[-1]), terms.dtype)
  sums = sums.at[receivers, senders].add(terms, mode="drop")
  multi_hot = (sums[..., :num_labels] > 0).astype(sums.dtype)
  counts = sums[..., -1:]
  means = sums[..., num_labels:-1] / jnp.maximum(counts, 1)
  pair_features_BTTR = jnp.concatenate([multi_hot, means], -1)
  mask = counts[..., 0] > 0
  return nan_if_clamped(pair_features_BTTR, labels, num_labels), mask


def sum_over_pairs(
  senders: Int[Array, "*B M"],
  receivers: Int[Array, "*B M"],
  x: Float[Array, "*B M F"],
  *,
  num_nodes: int,
) -> Float[Array, "*B M F"]:
  """Sums x, for every edge, over all edges of the same pair.

  Takes O(M log M) comparisons. The result at padding is arbitrary.
  """
  if senders.ndim > 1:  # sorts within each graph, so that devices exchange nothing
    per_graph = functools.partial(sum_over_pairs, num_nodes=num_nodes)
    return jax.vmap(per_graph)(senders, receivers, x)
  edges = _sort(senders, receivers, None, num_nodes, num_nodes)
  sums = edges.sum_of_pair(x[edges.order])
  return jnp.zeros_like(x).at[edges.order].set(sums)


class _Edges(NamedTuple):
  """Holds the edges of all graphs, sorted by receiver, sender and label.

  The indices of nodes count through the whole batch.
  """

  order: Int[Array, " M"]  # the index of each edge before sorting
  senders: Int[Array, " M"]
  receivers: Int[Array, " M"]  # padding is out of range, and last
  labels: Int[Array, " M"]  # -1 without a label
  pair: Int[Array, " M"]  # the index of the edge's pair
  is_first: Bool[Array, "M 1"]  # whether it is the first edge of its pair
  is_new: Bool[Array, " M"]  # whether it is the first of its pair with its label
  label_tables: EdgeLabels | None = None
  features: EdgeFeatures | None = None

  def sum_of_pair(self, x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    """Sums x, for every edge, over all edges of its pair."""
    return _sum_segments(x, self.pair, len(x))[self.pair]

  def vectors(self, name: str, dtype) -> Iterator[Float[Array, "M #N H"]]:
    """Yields what each edge adds to a_ij, for the "key" or the "value"."""
    table = getattr(self.label_tables, name, None)
    if table is not None:
      has_label = self.is_new & (self.labels >= 0)
      rows = _take_rows(table.astype(dtype), jnp.maximum(self.labels, 0))
      yield jnp.where(has_label[:, None, None], rows, 0)
    kernel = getattr(self.features, name, None)
    if self.features is not None and kernel is not None:
      x = self.features.features
      x_MF = x.reshape(-1, x.shape[-1])[self.order].astype(dtype)
      count_M1 = self.sum_of_pair(jnp.ones((len(x_MF), 1), dtype))
      yield jnp.einsum("MF,FNH->MNH", x_MF / count_M1, kernel.astype(dtype))


def _sort(
  senders: Array,
  receivers: Array,
  labels: EdgeLabels | None,
  num_queries: int,
  num_keys: int,
) -> _Edges:
  """Sorts the edges of a batch of graphs, with senders and receivers `[*B, M]`."""
  is_pair = is_edge(senders, receivers, num_queries, num_keys)
  *batch, _ = senders.shape
  num_graphs = math.prod(batch)
  graph = jnp.arange(num_graphs).reshape(*batch, 1)
  # Padding gets this index, so that it is sorted last and summed nowhere.
  out_of_range = max(num_queries, num_keys) * num_graphs
  senders = jnp.where(is_pair, graph * num_keys + senders, out_of_range).ravel()
  receivers = jnp.where(is_pair, graph * num_queries + receivers, out_of_range).ravel()
  rows = jnp.full_like(senders, -1)
  if labels is not None:
    rows = clamp(labels.labels, labels.num_rows).ravel()

  order = jnp.lexsort((rows, senders, receivers))
  senders = senders[order]
  receivers = receivers[order]
  rows = rows[order]
  is_first = _changes(senders) | _changes(receivers)
  is_new = is_first | _changes(rows)
  pair = jnp.cumsum(is_first) - 1
  return _Edges(order, senders, receivers, rows, pair, is_first[:, None], is_new)


def _sum_segments(
  x: Float[Array, "M ..."], segments: Int[Array, " M"], number: int
) -> Array:
  return jax.ops.segment_sum(x, segments, number, indices_are_sorted=True)


def _take_rows(
  x: Float[Array, "X ..."], rows: Int[Array, " M"]
) -> Float[Array, "M ..."]:
  """Returns rows of x by index; for padding, which is out of range, any row."""
  return jnp.take(x, rows, axis=0, mode="clip")


def _changes(x: Int[Array, " M"]) -> Bool[Array, " M"]:
  return jnp.diff(x, prepend=-2) != 0  # no node or label is -2
