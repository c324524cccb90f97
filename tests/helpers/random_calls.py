"""Calls with random sizes, options and relations of given kinds."""

import jax.numpy as jnp
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

BY_DISTANCE = ["positions", "distance", "linear", "content", "key"]
KINDS = ["positions", "labels", "features", "distance", "linear", "content", "key"]
KINDS += ["numbers", "function"]


def number_of_pair(params, i, j, x, y, z):
  """Returns a number per head that depends on everything that a function is given."""
  of_data = jnp.tanh(x @ y["vector"] + z)
  return params["each"] * of_data - params["all"] * jnp.log1p(1.0 * abs(i - j))


class RandomCall:
  """Makes arrays, relations of these kinds, and the other options of a call."""

  def __init__(self, kinds, seed, length=12):
    self.rng = rng = np.random.default_rng([seed, *map(KINDS.index, kinds)])
    ends = [3, length + 1, length + 1, 3, 3, 4, 6]
    self.batch, self.queries, self.keys, *sizes = map(int, rng.integers(1, ends))
    key_heads, group, self.width, self.value_width = sizes
    self.heads = key_heads * group
    self.arrays = {
      "query": self.normal(self.batch, self.queries, self.heads, self.width),
      "key": self.normal(self.batch, self.keys, key_heads, self.width),
      "value": self.normal(self.batch, self.keys, key_heads, self.value_width),
    }
    if self.flip():
      self.arrays["bias"] = self.normal(self.batch, 1, self.queries, self.keys)
    if self.flip():
      self.arrays["scale"] = jnp.asarray(rng.choice([-0.7, 0.0]))
    self.arrays["more"] = tuple(map(self.relation, kinds))
    self.options = self.random_options()

  def flip(self):
    return bool(self.rng.integers(2))

  def normal(self, *shape):
    return jnp.asarray(self.rng.normal(size=shape))

  def integers(self, low, high, *shape):
    return jnp.asarray(self.rng.integers(low, high, shape))

  def relation(self, kind):
    rows = int(self.rng.integers(1, 12))
    left = int(self.rng.integers(rows)) if self.flip() or rows % 2 == 0 else None
    sides = {"beyond": "zero" if self.flip() else "clip", "left": left}
    heads = [self.heads] * self.flip()
    if kind in BY_DISTANCE:
      return self.relation_by_distance(kind, rows, heads, sides)
    return self.relation_of_pairs(kind, rows, heads)

  def tables(self, rows, heads):
    """Returns a table for keys, one for values, or both."""
    keys = self.normal(rows, *heads, self.width)
    values = self.normal(rows, *heads, self.value_width)
    return [(keys, None), (None, values), (keys, values)][self.rng.integers(3)]

  def relation_by_distance(self, kind, rows, heads, sides):
    match kind:
      case "positions":
        return RelativePositions(*self.tables(rows, heads), **sides)
      case "distance":
        return DistanceBias(self.normal(rows, *heads), **sides)
      case "linear":
        return LinearBias(self.normal(self.heads))
      case "content":
        query = self.normal(self.batch, self.queries, self.heads, 5)
        return ContentBias(query, self.normal(rows, *heads, 5), **sides)
      case "key":
        return KeyBias(self.normal(rows, *heads, self.width), **sides)

  def relation_of_pairs(self, kind, rows, heads):
    pairs = self.batch, self.queries, self.keys
    match kind:
      case "labels":
        return EdgeLabels(self.integers(-1, rows, *pairs), *self.tables(rows, heads))
      case "features":
        return EdgeFeatures(self.normal(*pairs, rows), *self.tables(rows, heads))
      case "numbers":
        pairs = pairs[1:] if self.flip() else pairs
        return LabelBias(self.integers(-1, rows, *pairs), self.normal(rows, *heads))
      case "function":
        params = {"each": self.normal(self.heads), "all": self.normal()}
        of_query = self.normal(self.batch, self.queries, 3)
        of_key = {"vector": self.normal(self.keys, 3)}
        data = of_query, of_key, self.normal(*pairs)
        return FunctionBias(number_of_pair, params, *data)

  def random_options(self):
    options = {"is_causal": self.flip()}
    of_queries, of_keys = (self.batch, self.queries), (self.batch, self.keys)
    match self.rng.integers(4):
      case 0:
        options["query_positions"] = self.integers(-9, 9, *of_queries)
        options["key_positions"] = self.integers(-9, 9, *of_keys)
      case 1:
        options["query_offset"] = int(self.rng.integers(-20, 20))
      case 2:
        options["query_offset"] = self.integers(-20, 20, self.batch)
      case 3:
        options["query_offset"] = 0
    if self.flip():
      shape = self.batch, 1, self.queries, self.keys
      options["mask"] = jnp.asarray(self.rng.random(shape) < 0.7)
    if self.flip():
      options["query_segment_ids"] = self.integers(0, 2, *of_queries)
      options["key_segment_ids"] = self.integers(0, 2, *of_keys)
    if self.flip():
      options["logits_soft_cap"] = 0.8
    if self.flip():
      options["local_window_size"] = tuple(map(int, self.rng.integers(0, 9, 2)))
    return options
