"""Attention over a list of edges: time and memory grow with edges, not with pairs."""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from relpos_jax.attention import masks
from relpos_jax.attention.arrays import check_array, describe
from relpos_jax.attention.edge_list import (
  EdgeList,
  EdgeTerms,
  check_ends,
  group_edges,
  is_edge,
  sorting_now,
  sum_groups,
  take,
)
from relpos_jax.attention.features import EdgeFeatures
from relpos_jax.attention.inputs import call_sizes, check_numbers, check_tensors
from relpos_jax.attention.labels import EdgeLabels, clamp, nan_if_clamped
from relpos_jax.attention.partitioned import with_automatic_axes
from relpos_jax.attention.relation import Sizes
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

  $$e_{ij} = s\, q_i \cdot (k_j + a^K_{ij}) + b_{ij}$$

  $$z_i = \sum_{j \to i} \mathrm{softmax}_j(e_{ij}) (v_j + a^V_{ij})$$

  Shaw et al. 2018, section 3.1. The receiver is the query i, and the sender is the key
  j. Pairs without an edge are masked. So a node attends to itself only along an edge
  from itself to itself. A node without incoming edges gets zero output and zero
  gradient.

  Several edges may join the same pair. Then a_ij is the sum of the table rows for their
  labels, plus the mean of their projected features, and their biases are added up. A
  repeated label counts once; features and biases count for each edge. Without a bias,
  the result equals `dot_product_attention` with the relations and the mask of
  `relpos_jax.attention.edges.pair_features`.

  Takes O(M log M) comparisons, and O(M N H) memory and arithmetic for M edges.

  Args:
    query: `[B, T, N, H]`. Or `[T, N, H]`: then the other arguments have no axis B,
      either.
    key: `[B, S, K, H]`; N is a multiple of K. In self-attention over a graph, S = T.
    value: `[B, S, K, V]`, with any width V. Value tables have the same width.
    senders: integers `[B, M]`, indices of keys; -1 is padding.
    receivers: integers `[B, M]`, indices of queries; -1 is padding. Indices out of
      range raise if they are concrete, and are padding if they are traced.
    labels: `EdgeLabels(labels, key, value)` with labels `[B, M]`. -1 is an edge without
      a label: it adds no vector, but the receiver attends to the sender. For labels out
      of range see `EdgeLabels`.
    features: `EdgeFeatures(features, key, value)` with features `[B, M, F]`, finite
      ones for padding, too.
    bias: numbers `[B, M, N]` or `[B, M, 1]`, added to the logits after the scale.
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
  sizes = call_sizes(query, key, value)
  dtype = sizes.accumulation_dtype
  with sorting_now(sizes):
    senders, receivers = check_ends(senders, receivers, sizes)
    num_edges = senders.shape[1]
    terms = _check_terms(labels, features, sizes, num_edges)
    shares = [term.shares(senders, receivers, dtype) for term in terms]
    pairs, is_first = group_edges(senders, receivers)
    # From here on, M counts the edges of all sequences. With more than three axes, the
    # CPU compiler of XLA would take twenty times as long for a product summed over H.
    senders = _flatten_rows(senders, sizes.keys)
    receivers = _flatten_rows(receivers, sizes.queries)
    pairs = _flatten_rows(pairs, num_edges)
    is_first = is_first.reshape(-1, 1)
  bias_MN = _check_bias(bias, sizes, num_edges)
  if scale is None:
    scale = sizes.width**-0.5
  shape = *query.shape[:-1], sizes.value_width
  if not query.size or not key.size or not senders.size:
    return jnp.zeros(shape, value.dtype)

  query_MNH = take(_flatten_nodes(query, sizes.heads), receivers).astype(dtype)
  key_MNH = take(_flatten_nodes(key, sizes.heads), senders)
  logits_MN = jnp.sum(query_MNH * key_MNH, -1)
  for a_MNH, share_M1 in _vectors("key", terms, shares):
    logits_MN += sum_groups(share_M1 * jnp.sum(query_MNH * a_MNH, -1), pairs)
  logits_MN *= jnp.asarray(scale, dtype)
  if bias_MN is not None:
    logits_MN += sum_groups(bias_MN, pairs)
  num_queries = math.prod(query.shape[:-2])
  weights_MN = _softmax(logits_MN, receivers, is_first, num_queries)
  if dropout_rate:
    keeps = jax.random.bernoulli(dropout_key, 1 - dropout_rate, weights_MN.shape)
    weights_MN = jnp.where(keeps[pairs], weights_MN / (1 - dropout_rate), 0)

  value_MNV = take(_flatten_nodes(value, sizes.heads), senders)
  messages_MNV = jnp.where(is_first, weights_MN, 0)[..., None] * value_MNV
  for a_MNV, share_M1 in _vectors("value", terms, shares):
    messages_MNV += (weights_MN * share_M1)[..., None] * a_MNV
  output = jax.ops.segment_sum(messages_MNV, receivers, num_queries)
  return output.reshape(shape).astype(value.dtype)


def _check_terms(
  labels: EdgeLabels | None,
  features: EdgeFeatures | None,
  sizes: Sizes,
  num_edges: int,
) -> list[EdgeTerms]:
  """Returns the relations that are not None, checked."""
  terms = []
  kinds = ("labels", labels, EdgeLabels), ("features", features, EdgeFeatures)
  for name, relation, kind in kinds:
    if relation is None:
      continue
    if not isinstance(relation, kind):
      wanted = f"want {kind.__name__}(...) or None"
      if isinstance(relation, EdgeList):
        wanted += " (from_edges is for dot_product_attention)"
      raise ValueError(f"{name} is {describe(relation)}; {wanted}")
    terms.append(relation.checked_as(name, sizes, (*sizes.batch, num_edges)))
  return terms


def _check_bias(
  bias: ArrayLike | None, sizes: Sizes, num_edges: int
) -> Float[Array, "BM #N"] | None:
  """Returns the checked bias; None stays None."""
  if bias is None:
    return None
  edges = *sizes.batch, num_edges
  bias = check_array("bias", bias, jnp.floating, (*edges, sizes.heads), (*edges, 1))
  return bias.reshape(-1, bias.shape[-1]).astype(sizes.accumulation_dtype)


def _flatten_rows(rows: Int[Array, "B M"], number: int) -> Int[Array, " BM"]:
  """Turns indices in each sequence into indices in the flattened batch.

  A sequence has `number` nodes or edges. Padding stays out of range.
  """
  first = number * jnp.arange(rows.shape[0])[:, None]
  return jnp.where(rows < number, first + rows, number * rows.shape[0]).ravel()


def _flatten_nodes(x: Float[Array, "*B T K H"], heads: int) -> Float[Array, "BT N H"]:
  """Merges batch and nodes, and repeats the key heads."""
  key_heads, width = x.shape[-2:]
  return x.reshape(-1, key_heads, width).repeat(heads // key_heads, axis=1)


def _vectors(
  name: str, terms: list[EdgeTerms], shares: list[Float[Array, "B M"]]
) -> Iterator[tuple[Float[Array, "BM #N H"], Float[Array, "BM 1"]]]:
  """Yields `EdgeTerms.edge_rows` and `EdgeTerms.shares` of each relation.

  `name` selects its table: "key" or "value". Relations without this table are left out.
  """
  for term, share in zip(terms, shares, strict=True):
    table = getattr(term, name)
    if table is not None:
      rows = term.edge_rows(table)
      yield rows.reshape(-1, *rows.shape[2:]), share.reshape(-1, 1)


def _softmax(
  logits: Float[Array, "M N"],
  receivers: Int[Array, " M"],
  is_first: Bool[Array, "M 1"],
  num_queries: int,
) -> Float[Array, "M N"]:
  """Computes the softmax over the pairs of each receiver.

  All edges of a pair have the same logits, and get the weight of the pair. `is_first`
  is True for one edge of each pair, so that the pair counts once.
  """
  constants = jax.lax.stop_gradient(logits)
  highest = jax.ops.segment_max(constants, receivers, num_queries)
  highest = jnp.maximum(highest, masks.LOWEST)  # no NaN if all logits are -inf
  is_padding = receivers >= num_queries
  logits = logits - take(highest, receivers)
  powers = jnp.exp(jnp.where(is_padding[:, None], -jnp.inf, logits))
  pair_powers = jnp.where(is_first, powers, 0)
  totals = jax.ops.segment_sum(pair_powers, receivers, num_queries)
  totals = jnp.where(highest <= masks.LOWEST / 2, jnp.inf, totals)
  return powers / take(totals, receivers)


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
  edges' features. So concatenate the label table and the matrix of the features, and
  give `EdgeFeatures` the result as its matrix. Then the operator returns what
  `edge_attention` returns. The mask is True for pairs with an edge.

  Label -1 is an edge without a label; without features, F is 0. Other labels out of
  range are clamped. Under `jax.debug_nans`, traced ones make all features NaN instead.
  Takes O(T T (E + F)) memory.

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
