"""Attention by its definition, one query and key at a time."""

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


def row(relation, table, distance, head, shared_axes=2):
  """Returns the table row of a distance and head, by the definition of row order."""
  index = distance + (len(table) // 2 if relation.left is None else relation.left)
  if relation.beyond == "zero" and not 0 <= index < len(table):
    return np.zeros(table.shape[-1]) if shared_axes == 2 else 0.0
  found = table[min(max(index, 0), len(table) - 1)]
  return found if table.ndim == shared_axes else found[head]


def terms(relation, arrays, b, i, j, n, group, distance):
  """Returns a pair's scaled and unscaled terms of the logit, and the vector of its value."""
  query, key = arrays["query"][b, i, n], arrays["key"][b, j, n // group]
  of_head = lambda table: table if table.ndim == 2 else table[:, n]
  match relation:
    case LinearBias():
      return 0, -relation.slopes[n] * abs(distance), 0
    case LabelBias():
      label = relation.labels[(b, i, j)[-relation.labels.ndim :]]
      found = relation.table[label]
      return 0, (found[n] if found.ndim else found) * (label >= 0), 0
    case FunctionBias():  # of data with a batch for queries and pairs; of the distance alone
      data = relation.of_query[b, i], {k: x[j] for k, x in relation.of_key.items()}
      found = relation.function(
        relation.params, 0, distance, *data, relation.of_pair[b, i, j]
      )
      return 0, found[n], 0
    case DistanceBias():
      return 0, row(relation, relation.table, distance, n, shared_axes=1), 0
    case ContentBias():
      return 0, relation.query[b, i, n] @ row(relation, relation.table, distance, n), 0
    case KeyBias():
      return key @ row(relation, relation.table, distance, n), 0, 0
    case RelativePositions():
      vector = lambda table: row(relation, table, distance, n)
    case EdgeLabels():
      label = relation.labels[b, i, j]
      vector = lambda table: of_head(table)[label] * (label >= 0)
    case EdgeFeatures():
      vector = lambda table: relation.features[b, i, j] @ of_head(table)
  a_key, a_value = (
    0 if x is None else vector(x) for x in (relation.key, relation.value)
  )
  return np.sum(query * a_key), 0, a_value


def formula(arrays, options):
  """Computes the output for dicts of arrays, with a tuple of relations as "more", and options."""
  arrays, options = jax.tree.map(np.asarray, (arrays, options))
  query, key, value = (arrays[name] for name in ("query", "key", "value"))
  (batch, num_queries, heads, width), num_keys = query.shape, key.shape[1]
  group = heads // key.shape[2]
  offset = np.broadcast_to(options.get("query_offset", 0), batch)[:, None]
  of_queries = options.get("query_positions", offset + np.arange(num_queries))
  of_keys = np.broadcast_to(
    options.get("key_positions", np.arange(num_keys)), (batch, num_keys)
  )
  scale = arrays.get("scale", options.get("scale", width**-0.5))
  cap = options.get("logits_soft_cap")
  mask = np.broadcast_to(options.get("mask", True), (batch, 1, num_queries, num_keys))
  left, right = options.get("local_window_size", (np.inf, np.inf))
  output = np.zeros((*query.shape[:3], value.shape[3]))
  for b, i, n in np.ndindex(batch, num_queries, heads):
    logits, values = [], []
    for j in range(num_keys):
      distance = of_keys[b, j] - of_queries[b, i]
      segments = [options.get(f"{x}_segment_ids") for x in ("query", "key")]
      apart = segments[0] is not None and segments[0][b, i] != segments[1][b, j]
      later = options["is_causal"] and distance > 0
      if apart or later or not mask[b, 0, i, j] or not -left <= distance <= right:
        continue
      found = [terms(x, arrays, b, i, j, n, group, distance) for x in arrays["more"]]
      scaled, unscaled, vectors = zip(*found, strict=True) if found else ([], [], [])
      logit = scale * (query[b, i, n] @ key[b, j, n // group] + sum(scaled)) + sum(
        unscaled
      )
      logit += arrays["bias"][b, 0, i, j] if "bias" in arrays else 0
      logits.append(cap * np.tanh(logit / cap) if cap else logit)
      values.append(value[b, j, n // group] + sum(vectors))
    if logits:
      weights = np.exp(np.array(logits) - max(logits))
      output[b, i, n] = weights @ np.array(values) / weights.sum()
  return output
