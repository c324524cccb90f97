"""Attention over a list of edges, in time and memory of the edges, not of [T, S]."""

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
from relpos_jax.attention.inputs import check_numbers, check_tensors, sizes_of
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
  r"""Computes the attention of every node to the senders of the edges it receives.

  $$e_{ij} = s\, q_i \cdot (k_j + a^K_{ij})$$

  $$z_i = \sum_{j \to i} \mathrm{softmax}_j(e_{ij}) (v_j + a^V_{ij})$$

  Shaw et al. 2018, section 3.1; pairs without an edge are masked. The receiver is the
  query i, the sender the key j. Several edges may join a pair: its a_ij adds the row of
  each distinct label and the mean of its edges' features times the kernel. Repeating an
  edge changes only that mean. A node attends to itself only if it has an edge to
  itself. A node that receives no edge gets zero output and zero gradient. Equals
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
      label, whose receiver still attends to its sender. Labels out of range are as in
      the operator.
    features: `EdgeFeatures(features, key, value)` with features `[B, M, F]`.
    bias: numbers `[B, M, N]` or `[B, M, 1]`, added to the logits after the scale. A pair
      of several edges has their sum.
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
  # Concrete edges are sorted now: XLA would take minutes to fold the sort of constants.
  with jax.ensure_compile_time_eval():
    edges = _checked_edges(query, key, value, senders, receivers, labels, features)
  shape = *nodes, heads, value.shape[-1]
  if edges is None:
    return jnp.zeros(shape, value.dtype)

  dtype = accumulation_dtype(query.dtype)
  num_queries = math.prod(nodes)
  query_MNH = _at(_nodes(query, heads), edges.receivers).astype(dtype)
  key_MNH = _at(_nodes(key, heads), edges.senders)
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

  value_MNV = _at(_nodes(value, heads), edges.senders)
  weights_of_pairs = jnp.where(edges.is_first, weights_MN, 0)
  messages_MNV = weights_of_pairs[..., None] * value_MNV
  for a_MNV in edges.vectors("value", dtype):
    messages_MNV += weights_MN[..., None] * a_MNV
  output = _sum(messages_MNV, edges.receivers, num_queries)
  return output.reshape(shape).astype(value.dtype)


def _checked_edges(
  query: Array,
  key: Array,
  value: Array,
  senders: ArrayLike,
  receivers: ArrayLike,
  labels: EdgeLabels | None,
  features: EdgeFeatures | None,
) -> "_Edges | None":
  """Returns the edges, sorted; None if there are no pairs of nodes."""
  sizes = sizes_of(query, key, value)
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
  edges = _sorted(senders, receivers, labels, sizes.queries, sizes.keys)
  return edges._replace(label_tables=labels, features=features)


def _nodes(x: Float[Array, "*B T K H"], heads: int) -> Float[Array, "BT N H"]:
  """Returns a row for each node of the batch, with heads repeated."""
  key_heads, width = x.shape[-2:]
  return x.reshape(-1, key_heads, width).repeat(heads // key_heads, axis=1)


def _softmax(
  logits: Float[Array, "M N"], edges: "_Edges", num_queries: int
) -> Float[Array, "M N"]:
  """Computes the softmax over each receiver's pairs.

  Every edge of a pair gets the pair's weight.
  """
  constants = jax.lax.stop_gradient(logits)
  highest = jax.ops.segment_max(
    constants, edges.receivers, num_queries, indices_are_sorted=True
  )
  is_padding = edges.receivers >= num_queries
  logits = logits - _at(highest, edges.receivers)
  powers = jnp.exp(jnp.where(is_padding[:, None], -jnp.inf, logits))
  powers_of_pairs = jnp.where(edges.is_first, powers, 0)
  totals = _sum(powers_of_pairs, edges.receivers, num_queries)
  totals = jnp.where(totals > 0, totals, 1)
  return powers / _at(totals, edges.receivers)


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
  is_edge = _is_edge(senders, receivers, num_nodes, num_nodes)
  receivers = jnp.where(is_edge, receivers, num_nodes)  # out of range: dropped
  one_hot = jax.nn.one_hot(clamp(labels, num_labels), num_labels)
  count = jnp.ones((len(labels), 1))
  terms = jnp.concatenate([one_hot, features, count], -1)
  sums = jnp.zeros((num_nodes, num_nodes, terms.shape[-1]), terms.dtype)
  sums = sums.at[receivers, senders].add(terms, mode="drop")
  multi_hot = (sums[..., :num_labels] > 0).astype(sums.dtype)
  counts = sums[..., -1:]
  means = sums[..., num_labels:-1] / jnp.maximum(counts, 1)
  features_of_pairs = jnp.concatenate([multi_hot, means], -1)
  mask = counts[..., 0] > 0
  return nan_if_clamped(features_of_pairs, labels, num_labels), mask


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
  sums = edges.sum_of_pair(x[edges.order])
  return jnp.zeros_like(x).at[edges.order].set(sums)


class _Edges(NamedTuple):
  """The edges of all graphs, sorted by receiver, sender and label.

  Nodes are rows of the batch.
  """

  order: Int[Array, " M"]  # the index of each edge before sorting
  senders: Int[Array, " M"]
  receivers: Int[Array, " M"]  # out of range for padding, which is last
  labels: Int[Array, " M"]  # -1: none
  pair: Int[Array, " M"]  # the index of the pair that the edge joins
  is_first: Bool[Array, "M 1"]  # of its pair
  is_new: Bool[Array, " M"]  # the first of its pair with its label
  label_tables: EdgeLabels | None = None
  features: EdgeFeatures | None = None

  def sum_of_pair(self, x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    """Adds up x, for every edge, over the edges of its pair."""
    return _sum(x, self.pair, len(x))[self.pair]

  def vectors(self, name: str, dtype) -> Iterator[Float[Array, "M #N H"]]:
    """Yields the terms of each edge in its pair's a_ij, of the "key" or the "value"."""
    table = getattr(self.label_tables, name, None)
    if table is not None:
      has_label = self.is_new & (self.labels >= 0)
      rows = _at(table.astype(dtype), jnp.maximum(self.labels, 0))
      yield jnp.where(has_label[:, None, None], rows, 0)
    kernel = getattr(self.features, name, None)
    if kernel is not None:
      x = self.features.features
      x_MF = x.reshape(-1, x.shape[-1])[self.order].astype(dtype)
      count_M1 = self.sum_of_pair(jnp.ones((len(x_MF), 1), dtype))
      yield jnp.einsum("MF,FNH->MNH", x_MF / count_M1, kernel.astype(dtype))


def _sorted(
  senders: Array,
  receivers: Array,
  labels: EdgeLabels | None,
  num_queries: int,
  num_keys: int,
) -> _Edges:
  """Sorts the edges of a batch of graphs; senders and receivers are `[*B, M]`."""
  is_edge = _is_edge(senders, receivers, num_queries, num_keys)
  *batch, _ = senders.shape
  num_graphs = math.prod(batch)
  graph = jnp.arange(num_graphs).reshape(*batch, 1)
  # Out of range, so that padding comes last and is summed nowhere.
  nowhere = max(num_queries, num_keys) * num_graphs
  senders = jnp.where(is_edge, graph * num_keys + senders, nowhere).ravel()
  receivers = jnp.where(is_edge, graph * num_queries + receivers, nowhere).ravel()
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


def _is_edge(
  senders: Array, receivers: Array, num_queries: int, num_keys: int
) -> Bool[Array, "*B M"]:
  """Returns False for padding."""
  is_sender = (senders >= 0) & (senders < num_keys)
  is_receiver = (receivers >= 0) & (receivers < num_queries)
  return is_sender & is_receiver


def _sum(x: Float[Array, "M ..."], segments: Int[Array, " M"], number: int) -> Array:
  return jax.ops.segment_sum(x, segments, number, indices_are_sorted=True)


def _at(x: Float[Array, "X ..."], rows: Int[Array, " M"]) -> Float[Array, "M ..."]:
  """Returns rows of x; an arbitrary one where the index is out of range, at padding."""
  return jnp.take(x, rows, axis=0, mode="clip")


def _changes(x: Int[Array, " M"]) -> Bool[Array, " M"]:
  return jnp.diff(x, prepend=-2) != 0  # no node or label is -2
