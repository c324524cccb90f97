"""Attention with positions in float64 NumPy, term by term from the papers.

`attention(arrays, options)` returns what the suite expects: the output, and the
gradient of the sum of output times cotangent for each floating array. Slow and plain:
every pair of query and key has its own numbers. Letters of axes: B batch, T queries,
S keys, N heads, H head width, R rows of a table.
"""

import numpy as np

# Arrays that have no gradient.
FIXED = (
  "cotangent",
  "mask",
  "labels",
  "query_positions",
  "key_positions",
  "query_segments",
  "key_segments",
)


def attention(arrays, options):
  """Returns the output [B, T, N, V] and a dictionary of gradients."""
  x = {name: widened(values) for name, values in arrays.items()}
  groups = x["query"].shape[2] // x["key"].shape[2]
  query_at, key_at = positions(x, options)
  query = rotated(x["query"], query_at, options)
  key = np.repeat(rotated(x["key"], key_at, options), groups, axis=2)
  value = np.repeat(x["value"], groups, axis=2)
  distance = key_at[:, None, :] - query_at[:, :, None]  # j - i, [B, T, S]
  one_hot = table_rows(x, options, distance)
  scale = options.get("scale", query.shape[3] ** -0.5)

  # e_ij = scale ((q_i + u) k_j + (q_i + v) a_ij + k_j b_ij) + biases
  content_query = query + x.get("content_bias", 0.0)
  position_query = query + x.get("position_bias", 0.0)
  key_vector = looked_up(one_hot, x, "key_table")
  query_vector = looked_up(one_hot, x, "query_table")
  logits = scale * np.einsum("btnh,bsnh->bnts", content_query, key)
  logits = logits + scale * np.einsum("btnh,btsnh->bnts", position_query, key_vector)
  logits = logits + scale * np.einsum("bsnh,btsnh->bnts", key, query_vector)
  logits = logits + x.get("bias", 0.0)
  buckets = t5_buckets(x, options, distance)
  if "distance_bias" in x:
    logits = logits + np.einsum("btsr,rn->bnts", one_hot, x["distance_bias"])
  if "buckets" in x:
    logits = logits + np.einsum("btsr,rn->bnts", buckets, x["buckets"])
  if options.get("alibi"):
    slopes = alibi_slopes(query.shape[2])
    logits = logits - slopes[:, None, None] * np.abs(distance)[:, None]
  slope = 1.0
  if "soft_cap" in options:
    cap = options["soft_cap"]
    slope = 1 - np.tanh(logits / cap) ** 2
    logits = cap * np.tanh(logits / cap)
  logits = np.where(attended(x, options, distance), logits, -np.inf)

  weights, sink_weights = softmax(logits, x.get("sinks"))
  values = value[:, None] + looked_up(one_hot, x, "value_table")  # [B, T, S, N, V]
  output = np.einsum("bnts,btsnv->btnv", weights, values)

  # The same lines backward: d_x is the gradient of x.
  cotangent = x["cotangent"]
  d_weights = np.einsum("btnv,btsnv->bnts", cotangent, values)
  mean = (weights * d_weights).sum(-1, keepdims=True)
  d_logits = weights * (d_weights - mean) * slope
  d_scaled = scale * d_logits
  d_content = np.einsum("bnts,bsnh->btnh", d_scaled, key)
  d_position = np.einsum("bnts,btsnh->btnh", d_scaled, key_vector)
  d_key = np.einsum("bnts,btnh->bsnh", d_scaled, content_query)
  d_key = d_key + np.einsum("bnts,btsnh->bsnh", d_scaled, query_vector)
  d_value = np.einsum("bnts,btnv->bsnv", weights, cotangent)
  gradients = {
    "query": rotated(d_content + d_position, query_at, options, back=True),
    "key": rotated(summed_groups(d_key, groups), key_at, options, back=True),
    "value": summed_groups(d_value, groups),
    "content_bias": d_content.sum((0, 1)),
    "position_bias": d_position.sum((0, 1)),
    "key_table": np.einsum("bnts,btnh,btsr->rnh", d_scaled, position_query, one_hot),
    "query_table": np.einsum("bnts,bsnh,btsr->rnh", d_scaled, key, one_hot),
    "value_table": np.einsum("bnts,btnv,btsr->rnv", weights, cotangent, one_hot),
    "distance_bias": np.einsum("bnts,btsr->rn", d_logits, one_hot),
    "buckets": np.einsum("bnts,btsr->rn", d_logits, buckets),
    "bias": d_logits,
    "sinks": -(sink_weights * mean).sum((0, 2, 3)),
  }
  return output, {
    name: summed_to(gradients[name], x[name].shape) for name in x if name not in FIXED
  }


def widened(values):
  """Returns floats as float64, integers as int64 and masks as they are."""
  dtypes = {"f": np.float64, "i": np.int64, "b": bool}
  return values.astype(dtypes[values.dtype.kind])


def positions(x, options):
  """Returns positions [B, T] of queries and [B, S] of keys."""
  batch, queries = x["query"].shape[:2]
  keys = x["key"].shape[1]
  query_at = np.arange(queries) + options.get("query_offset", 0)
  query_at = np.broadcast_to(x.get("query_positions", query_at), (batch, queries))
  key_at = np.broadcast_to(x.get("key_positions", np.arange(keys)), (batch, keys))
  return query_at, key_at


def table_rows(x, options, distance):
  """Returns the row of each pair in the tables, one-hot [B, T, S, R].

  Shaw et al. 2018, section 3.2: distances are clipped; row `left` is distance 0. With
  `beyond="zero"` there is no term outside of the table (Huang et al. 2018). With
  `labels` the rows are labels of pairs, and -1 is none.
  """
  tables = ("key_table", "query_table", "value_table", "distance_bias")
  rows = max((len(x[name]) for name in tables if name in x), default=1)
  if "labels" in x:
    index = np.broadcast_to(x["labels"], distance.shape)
  else:
    index = distance + options.get("left", rows // 2)
  if options.get("beyond", "clip") == "clip" and "labels" not in x:
    index = np.clip(index, 0, rows - 1)
  return (index[..., None] == np.arange(rows)).astype(np.float64)


def looked_up(one_hot, x, name):
  """Returns the vector of each pair [B, T, S, N, H]; zero without a table."""
  heads = x["query"].shape[2]
  if name not in x:
    width = x["value"].shape[3] if name == "value_table" else x["query"].shape[3]
    return np.zeros((*one_hot.shape[:3], heads, width))
  table = x[name] if x[name].ndim == 3 else x[name][:, None]
  table = np.broadcast_to(table, (len(table), heads, table.shape[2]))
  return np.einsum("btsr,rnh->btsnh", one_hot, table)


def t5_buckets(x, options, distance):
  """Returns T5's bucket of each pair, one-hot; Raffel et al. 2020, section 2.1.

  Half of the buckets have one distance each; the others grow with its logarithm up to
  `max_distance`. Bidirectional: later keys have the second half of all.
  """
  number = len(x.get("buckets", [0]))
  bidirectional, max_distance = options.get("t5", (False, 128))
  all_buckets = np.arange(number)
  if bidirectional:
    number = number // 2
  back = np.abs(distance) if bidirectional else np.maximum(-distance, 0)
  exact = max(number // 2, 1)
  ratio = np.log(np.maximum(back, 1) / exact) / np.log(max_distance / exact)
  grown = exact + np.floor(ratio * (number - exact) + 1e-9).astype(int)  # 2.999... is 3
  bucket = np.where(back < exact, back, np.minimum(grown, number - 1))
  bucket = bucket + number * (bidirectional and distance > 0)
  return (bucket[..., None] == all_buckets).astype(np.float64)


def alibi_slopes(heads):
  """Returns the slopes [N] of Press et al. 2022, by their published code.

  For a power of two they are 2**(-8 n / N). Other numbers of heads take those of the
  power below, and then every second one of the power above.
  """
  power = 2 ** int(np.log2(heads))
  slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
  finer = 2.0 ** (-4 * np.arange(1, 2 * power + 1) / power)
  return np.concatenate([slopes, finer[::2][: heads - power]])


def rotated(x, at, options, back=False):
  """Turns vectors by their positions: Su et al. 2021, section 3.2.2.

  The pairs of elements are (2d, 2d + 1) for "interleaved", as in the paper, or (d, d +
  H/2) for "halves", as in GPT-NeoX.
  """
  if "rotary" not in options:
    return x
  half = x.shape[3] // 2
  angle = at[..., None] * 10_000.0 ** (-np.arange(half) / half)
  sine, cosine = np.sin(angle)[:, :, None], np.cos(angle)[:, :, None]
  sine = -sine if back else sine
  interleaved = options["rotary"] == "interleaved"
  places = (slice(0, None, 2), slice(1, None, 2))
  if not interleaved:
    places = (slice(0, half), slice(half, None))
  first, second = x[..., places[0]], x[..., places[1]]
  result = np.empty_like(x)
  result[..., places[0]] = first * cosine - second * sine
  result[..., places[1]] = second * cosine + first * sine
  return result


def attended(x, options, distance):
  """Returns whether a query attends to a key, [B, N or 1, T, S]."""
  allowed = np.ones(distance.shape, bool)
  if options.get("causal"):
    allowed &= distance <= 0
  if "window" in options:  # so many keys to the left, and to the right
    left, right = options["window"]
    allowed &= (distance >= -left) & (distance <= right)
  if "query_segments" in x:
    allowed &= x["query_segments"][:, :, None] == x["key_segments"][:, None, :]
  return allowed[:, None] & x.get("mask", True)


def softmax(logits, sinks=None):
  """Returns the weights of keys and of sinks [B, N, T, 1]; without keys, zeros.

  A sink is the logit of one more key, with the value zero (gpt-oss, 2025).
  """
  sink = -np.inf if sinks is None else sinks[:, None, None]
  highest = np.maximum(logits.max(-1, keepdims=True), sink)
  highest = np.where(np.isneginf(highest), 0.0, highest)
  numbers = np.exp(logits - highest)
  sink_number = np.exp(sink - highest)
  total = numbers.sum(-1, keepdims=True) + sink_number
  total = np.where(total == 0, 1.0, total)
  return numbers / total, sink_number / total


def summed_groups(gradient, groups):
  """Sums over the query heads that share a key head."""
  batch, keys, heads, width = gradient.shape
  return gradient.reshape(batch, keys, heads // groups, groups, width).sum(3)


def summed_to(gradient, shape):
  """Sums over the axes that an array of this shape was broadcast over."""
  if gradient.ndim == 3 and len(shape) == 2:  # a table that all heads share
    gradient = gradient.sum(1)
  while gradient.ndim > len(shape):
    gradient = gradient.sum(0)
  for axis, size in enumerate(shape):
    if size == 1 and gradient.shape[axis] > 1:
      gradient = gradient.sum(axis, keepdims=True)
  return gradient
