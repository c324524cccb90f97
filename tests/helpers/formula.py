"""Attention by its definition, one query and key at a time."""

from typing import Any, NamedTuple

import jax
import numpy as np

from relpos_jax import (
  ContentBias,
  DistanceBias,
  EdgeFeatures,
  EdgeLabels,
  FunctionBias,
  KeyBias,
  LabelBias,
  LinearBias,
  RelativePositions,
)


class Pair(NamedTuple):
  """A query and a key of one head."""

  sequence: int
  i: int
  j: int
  head: int
  distance: int
  query: np.ndarray
  key: np.ndarray

  @property
  def index(self):
    return self.sequence, self.i, self.j


class Terms(NamedTuple):
  """What a relation adds to a pair's logit, scaled or not, and to its value."""

  scaled: Any = 0.0
  unscaled: Any = 0.0
  value: Any = 0.0


def row(relation, table, pair, shared_axes=2):
  """Returns the table row of a pair's distance, by the definition of row order."""
  left = len(table) // 2 if relation.left is None else relation.left
  index = pair.distance + left
  nearest = min(max(index, 0), len(table) - 1)
  if relation.beyond == "zero" and index != nearest:
    return np.zeros(table.shape[-1] if shared_axes == 2 else ())
  if table.ndim == shared_axes:
    return table[nearest]
  return table[nearest, pair.head]


def of_head(table, pair):
  return table if table.ndim == 2 else table[:, pair.head]


def of_vectors(relation, pair, vector_of):
  """Returns the terms of a relation that has tables for keys and for values."""
  key_term, value_term = 0.0, 0.0
  if relation.key is not None:
    key_term = pair.query @ vector_of(relation.key)
  if relation.value is not None:
    value_term = vector_of(relation.value)
  return Terms(scaled=key_term, value=value_term)


def relative_positions(relation, pair):
  return of_vectors(relation, pair, lambda table: row(relation, table, pair))


def edge_labels(relation, pair):
  label = relation.labels[pair.index]

  def vector_of(table):
    return of_head(table, pair)[label] * (label >= 0)

  return of_vectors(relation, pair, vector_of)


def edge_features(relation, pair):
  features = relation.features[pair.index]
  return of_vectors(relation, pair, lambda table: features @ of_head(table, pair))


def linear_bias(relation, pair):
  return Terms(unscaled=-relation.slopes[pair.head] * abs(pair.distance))


def distance_bias(relation, pair):
  return Terms(unscaled=row(relation, relation.table, pair, shared_axes=1))


def content_bias(relation, pair):
  query = relation.query[pair.sequence, pair.i, pair.head]
  return Terms(unscaled=query @ row(relation, relation.table, pair))


def key_bias(relation, pair):
  return Terms(scaled=pair.key @ row(relation, relation.table, pair))


def label_bias(relation, pair):
  label = relation.labels[pair.index[-relation.labels.ndim :]]
  numbers = relation.table[label]
  number = numbers if numbers.ndim == 0 else numbers[pair.head]
  return Terms(unscaled=number * (label >= 0))


def function_bias(relation, pair):
  """Takes data with a batch for queries and pairs, and a function of the distance."""
  of_query = relation.of_query[pair.sequence, pair.i]
  of_key = {name: x[pair.j] for name, x in relation.of_key.items()}
  data = of_query, of_key, relation.of_pair[pair.index]
  numbers = relation.function(relation.params, 0, pair.distance, *data)
  return Terms(unscaled=numbers[pair.head])


TERMS = {
  RelativePositions: relative_positions,
  EdgeLabels: edge_labels,
  EdgeFeatures: edge_features,
  LinearBias: linear_bias,
  DistanceBias: distance_bias,
  ContentBias: content_bias,
  KeyBias: key_bias,
  LabelBias: label_bias,
  FunctionBias: function_bias,
}


def pair_distances(options, batch, num_queries, num_keys):
  """Returns the distances from queries to keys, [B, T, S]."""
  first = np.broadcast_to(options.get("query_offset", 0), batch)[:, None]
  queries = options.get("query_positions", first + np.arange(num_queries))
  keys = options.get("key_positions", np.arange(num_keys)[None])
  return keys[:, None, :] - queries[:, :, None]


def pair_mask(options, distance):
  """Returns whether queries attend to keys, [B, T, S]."""
  left, right = options.get("local_window_size", (np.inf, np.inf))
  attends = (distance >= -left) & (distance <= right)
  if options["is_causal"]:
    attends &= distance <= 0
  if "mask" in options:
    attends &= options["mask"][:, 0]
  if "query_segment_ids" in options:
    of_queries = options["query_segment_ids"][:, :, None]
    attends &= of_queries == options["key_segment_ids"][:, None]
  return attends


def formula(arrays, options):
  """Computes the output for dicts of arrays, with relations as "more", and options."""
  arrays, options = jax.tree.map(np.asarray, (arrays, options))
  query, key, value = arrays["query"], arrays["key"], arrays["value"]
  batch, num_queries, heads, _ = query.shape
  num_keys, key_heads = key.shape[1:3]
  distance = pair_distances(options, batch, num_queries, num_keys)
  attends = pair_mask(options, distance)
  output = np.zeros((*query.shape[:3], value.shape[3]))
  for b, i, n in np.ndindex(batch, num_queries, heads):
    logits, values = [], []
    for j in np.flatnonzero(attends[b, i]):
      of_key = b, j, n * key_heads // heads
      pair = Pair(b, i, j, n, distance[b, i, j], query[b, i, n], key[of_key])
      terms = [TERMS[type(relation)](relation, pair) for relation in arrays["more"]]
      logits.append(logit(pair, terms, arrays, options))
      values.append(value[of_key] + sum(x.value for x in terms))
    if logits:
      weights = weigh(np.array(logits), options, num_keys)
      output[b, i, n] = weights @ np.array(values)
  return output


def logit(pair, terms, arrays, options):
  """Computes the logit of a pair, with the terms of its relations."""
  scale = arrays.get("scale", options.get("scale", len(pair.query) ** -0.5))
  content = pair.query @ pair.key + sum(x.scaled for x in terms)
  total = scale * content + sum(x.unscaled for x in terms)
  if "bias" in arrays:
    total += arrays["bias"][pair.sequence, 0, pair.i, pair.j]
  cap = options.get("logits_soft_cap")
  return total if cap is None else cap * np.tanh(total / cap)


def weigh(logits, options, num_keys):
  """Computes the weights of a query's keys: the softmax, or SiLU over a divisor."""
  if options.get("weights") == "silu":
    return logits / (1 + np.exp(-logits)) / (options["divisor"] or num_keys)
  powers = np.exp(logits - logits.max())
  return powers / powers.sum()
