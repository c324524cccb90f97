"""The laws of every relation, alone and in sums, in float64, on random tables."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import as_users_do, quickly, with_gradients
from formula import formula
from kernel_calls import LOW, _results, call, results

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
  dot_product_attention,
  merge,
  rotate,
)
from relpos_jax.attention import band, blocks, lookup

pytestmark = pytest.mark.usefixtures("float64")

TOLERANCE = dict(rtol=0, atol=1e-10)
KINDS = ["positions", "labels", "features", "distance", "linear", "content", "key"]
KINDS += ["numbers", "function"]
BY_DISTANCE = ["positions", "distance", "linear", "content", "key"]
SUMS = [
  ("positions", "labels", "distance"),
  ("labels", "labels"),
  ("key", "features", "content", "linear"),
  ("function", "positions", "numbers", "function"),
  ("positions", "key"),
  (*BY_DISTANCE, *BY_DISTANCE),
]


def of_pair(params, i, j, x, y, z):
  """Returns a number per head that depends on everything that a function is given."""
  return params["each"] * jnp.tanh(x @ y["vector"] + z) - params["all"] * jnp.log1p(
    1.0 * abs(i - j)
  )


class RandomCall:
  """Makes arrays, relations of these kinds, and the other options of a call."""

  def __init__(self, kinds, seed, length=12):
    self.rng = rng = np.random.default_rng([seed, *map(KINDS.index, kinds)])
    (
      self.batch,
      self.queries,
      self.keys,
      key_heads,
      group,
      self.width,
      self.value_width,
    ) = map(int, rng.integers(1, [3, length + 1, length + 1, 3, 3, 4, 6]))
    self.heads = key_heads * group
    self.arrays = dict(
      query=self.normal(self.batch, self.queries, self.heads, self.width),
      key=self.normal(self.batch, self.keys, key_heads, self.width),
      value=self.normal(self.batch, self.keys, key_heads, self.value_width),
    )
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
    sides = dict(beyond="zero" if self.flip() else "clip", left=left)
    heads = [self.heads] * self.flip()
    table = self.normal(rows, *heads, self.width)
    values = self.normal(rows, *heads, self.value_width)
    both = [[table, None], [None, values], [table, values]][self.rng.integers(3)]
    pairs = self.batch, self.queries, self.keys
    match kind:
      case "positions":
        return RelativePositions(*both, **sides)
      case "labels":
        return EdgeLabels(self.integers(-1, rows, *pairs), *both)
      case "features":
        return EdgeFeatures(self.normal(*pairs, rows), *both)
      case "distance":
        return DistanceBias(table[..., 0], **sides)
      case "linear":
        return LinearBias(self.normal(self.heads))
      case "content":
        query = self.normal(self.batch, self.queries, self.heads, 5)
        return ContentBias(query, self.normal(rows, *heads, 5), **sides)
      case "key":
        return KeyBias(table, **sides)
      case "numbers":
        return LabelBias(
          self.integers(-1, rows, *pairs[not self.flip() :]), table[..., 0]
        )
      case "function":
        params = dict(each=self.normal(self.heads), all=self.normal())
        of_key = dict(vector=self.normal(self.keys, 3))
        return FunctionBias(
          of_pair, params, self.normal(*pairs[:2], 3), of_key, self.normal(*pairs)
        )

  def random_options(self):
    options = dict(is_causal=self.flip())
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


def random_call(kinds, seed):
  made = RandomCall(kinds, seed)
  return made.arrays, made.options


@pytest.fixture(autouse=True)
def compile_anew():
  """Compiles again what a test has patched."""
  _results.clear_cache()


def assert_close(actual, wanted, whose=""):
  close = functools.partial(np.testing.assert_allclose, **TOLERANCE, err_msg=str(whose))
  jax.tree.map(close, actual, wanted)


# Laws 1 and 12.
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kinds", [*((x,) for x in KINDS), *SUMS], ids="+".join)
def test_every_relation_and_every_sum_is_its_formula(kinds, seed, monkeypatch):
  """Takes a sum in either order."""
  arrays, options = random_call(kinds[:: 1 - 2 * seed], seed)
  heads = 2 if seed else None  # at a time
  monkeypatch.setattr(band, "_choose_sizes", lambda *_: (4, 7, heads))
  monkeypatch.setattr(blocks, "default_block", lambda *_: 4)
  wanted = results("reference", arrays, options)
  np.testing.assert_allclose(wanted["output"], formula(arrays, options), **TOLERANCE)
  for name in ("projected", "per_position", "chunked"):
    assert_close(results(name, arrays, options), wanted, name)
  if {*kinds} <= {
    *BY_DISTANCE
  }:  # others take it if positions are 0, 1, 2, ... from an offset on
    linear = {name: x for name, x in options.items() if "positions" not in name}
    linear |= dict(dropout_rate=0.3, dropout_key=jax.random.key(0)) if seed else {}
    is_new = linear.keys() != options.keys()
    wanted = results("reference", arrays, linear) if is_new else wanted
    for name in ["skew"] + ["chunked"] * is_new:
      assert_close(results(name, arrays, linear), wanted, name)


@pytest.mark.parametrize("kind", KINDS)
def test_lookups_by_products_are_lookups(kind, monkeypatch):
  arrays, options = random_call([kind], 0)
  wanted = results("reference", arrays, options)
  monkeypatch.setattr(lookup, "look_up", lambda x, labels: lookup.multiply(labels, x))
  assert_close(results("projected", arrays, options), wanted)  # as on accelerators


# Law 15.
@pytest.mark.parametrize(
  "hidden, is_causal", [([2, 4], False), ([0, 1, 8], True)], ids=str
)
def test_rows_that_hide_distances_cost_no_digits(hidden, is_causal, monkeypatch):
  """Compares float32 with float64; a table has other rows, slopes and a value table beside it."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  monkeypatch.setattr(band, "_choose_sizes", lambda *_: (16, 31, None))
  low = dict(is_causal=is_causal, mask=jnp.arange(40)[None, None, None] % 7 != 3)
  # Each head has a number of its own. A soft cap bounds a number that does not hide.
  capped = low | dict(query_offset=jnp.array([2]), logits_soft_cap=3.0)
  for options, numbers in ((low, LOW), (capped, [x for x in LOW if x < -1e38])):
    heads = len(numbers)
    arrays = {name: normal(1, 40, heads, 4) for name in ("query", "key", "value")}
    arrays["more"] = (
      DistanceBias(normal(9, heads).at[jnp.array(hidden)].set(jnp.array(numbers))),
      RelativePositions(normal(5, 4), normal(5, heads, 4)),
      LinearBias(jnp.linspace(0.1, 0.5, heads)),
    )
    wanted = results(
      "reference", jax.tree.map(lambda x: x.astype(float), arrays), options
    )
    for name in ("reference", "skew", "projected", "per_position", "chunked"):
      close = functools.partial(
        np.testing.assert_allclose, rtol=2e-6, atol=2e-5, err_msg=name
      )
      jax.tree.map(close, results(name, arrays, options), wanted)


def t5_bucket(distance, num_buckets, max_distance, bidirectional=True):
  """Returns the bucket of one distance, in the float32 arithmetic of Mesh TensorFlow and T5X."""
  offset, n = 0, -distance
  if bidirectional:
    num_buckets //= 2
    offset, n = num_buckets * (n < 0), abs(n)
  n = max(n, 0)
  max_exact = num_buckets // 2
  if n < max_exact:
    return offset + n
  ratio = np.log(np.float32(n) / np.float32(max_exact) + np.finfo(np.float32).eps)
  ratio /= np.float32(np.log(max_distance / max_exact))
  large = max_exact + int(ratio * np.float32(num_buckets - max_exact))
  return offset + min(large, num_buckets - 1)


def deberta_bucket(distance, num_buckets, max_distance):
  """Returns the bucket of one distance, as DeBERTa's code does in float32, by query minus key."""
  bucket, mid = -distance, num_buckets // 4
  if abs(distance) > mid:
    far, farthest = (
      np.float32(abs(distance) / mid),
      np.float32((max_distance - 1) / mid),
    )
    log_pos = np.ceil(np.log(far) / np.log(farthest) * np.float32(mid - 1)) + mid
    bucket = int(log_pos * np.sign(bucket))
  return min(max(bucket + num_buckets // 2, 0), num_buckets - 1)


ONE_WAY = dict(bidirectional=False)
T5 = [
  (DistanceBias.t5, t5_bucket),
  (
    functools.partial(DistanceBias.t5, **ONE_WAY),
    functools.partial(t5_bucket, **ONE_WAY),
  ),
]
DEBERTA = [(kind.deberta, deberta_bucket) for kind in (RelativePositions, KeyBias)]
BUCKETS = [*itertools.product(T5, [(32, 128), (9, 6)])]
BUCKETS += itertools.product(DEBERTA, [(512, 512), (4, 3), (8, 40)])


@pytest.mark.parametrize("functions, sizes", BUCKETS)
def test_rows_are_the_buckets_of_the_published_code(functions, sizes):
  (make, bucket), (num_buckets, max_distance) = functions, sizes
  buckets = jnp.asarray(np.random.default_rng(0).normal(size=(num_buckets, 3)))
  distances = np.arange(-700, 700)
  found = [bucket(int(x), num_buckets, max_distance) for x in distances]
  relation = make(buckets, max_distance=max_distance)
  (table,) = jax.tree.leaves(relation)
  rows = relation.labels(jnp.zeros(1, int), jnp.asarray(distances))[0]
  np.testing.assert_array_equal(table[rows], buckets[jnp.asarray(found)])
  assert len(set(found)) > num_buckets // 2


def test_alibi_has_the_slopes_of_the_paper_and_its_code():
  def slopes(n):
    if math.log2(n).is_integer():
      start = 2 ** (-(2 ** -(math.log2(n) - 3)))
      return [start * start**i for i in range(n)]
    closest = 2 ** math.floor(math.log2(n))
    return slopes(closest) + slopes(2 * closest)[0::2][: n - closest]

  for n in range(1, 40):
    np.testing.assert_allclose(LinearBias.alibi(n).slopes, slopes(n), rtol=1e-12)
  np.testing.assert_allclose(LinearBias.alibi(8).slopes, [2.0**-x for x in range(1, 9)])


def test_rotate_turns_the_part_that_has_frequencies():
  rng = np.random.default_rng(0)
  x, frequencies = (
    jnp.asarray(rng.normal(size=(2, 5, 3, 10))),
    jnp.asarray(rng.normal(size=3)),
  )
  positions = jnp.asarray(rng.integers(-9, 99, (2, 5)))
  found = rotate(x, positions, frequencies=frequencies)
  pair = x[..., :3] + 1j * x[..., 3:6]
  turned = pair * jnp.exp(1j * positions[..., None, None] * frequencies)
  wanted = jnp.concatenate([turned.real, turned.imag, x[..., 6:]], axis=-1)
  np.testing.assert_allclose(found, wanted, **TOLERANCE)
  usual = 100.0 ** (-jnp.arange(5) / 5)
  by_base = rotate(x, positions, base=100.0)
  np.testing.assert_allclose(
    rotate(x, positions, frequencies=usual), by_base, **TOLERANCE
  )
  np.testing.assert_array_equal(rotate(x, positions, frequencies=jnp.zeros(4)), x)
  np.testing.assert_array_equal(rotate(x[1], positions[1], base=100.0), by_base[1])
  small = x.astype(jnp.bfloat16)
  rounded = rotate(small.astype(jnp.float32), positions).astype(jnp.bfloat16)
  np.testing.assert_array_equal(rotate(small, positions), rounded, strict=True)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("offset", [300, -300, 30_000])
def test_a_linear_bias_far_away(offset, cap):
  arrays, _ = random_call(("linear",), 1)
  arrays = {name: arrays[name] for name in ("query", "key", "value")}
  arrays["more"] = (LinearBias(jnp.full(arrays["query"].shape[2], 1e-5)),)
  given = dict(query_positions=offset + jnp.arange(arrays["query"].shape[1]))
  options = dict(logits_soft_cap=cap)
  wanted = results("reference", arrays, options | given)
  for way in (offset, jnp.asarray(offset)):
    assert_close(results("chunked", arrays, options | dict(query_offset=way)), wanted)


@pytest.mark.parametrize("kinds", [("positions", "key"), ("function",)])
def test_an_offset_as_large_as_distances_may_be(kinds, monkeypatch):
  """Bounds logits: without the cap, numbers that all keys of a query share would
  cancel.

  Compares float32, whose integers have 32 bits, with the definition in float64.
  """
  monkeypatch.setattr(band, "_choose_sizes", lambda *_: (4, 7, None))
  monkeypatch.setattr(blocks, "default_block", lambda *_: 4)
  made = RandomCall(kinds, 4)
  wide = made.arrays
  slopes = LinearBias(2.0**-32 * jnp.arange(1, 1 + made.heads))
  wide["more"] += DistanceBias(made.normal(12, made.heads), left=10), slopes
  names = ["reference", "projected", "chunked"] + ["skew"] * ("key" in kinds)
  ends = 2**31 - made.queries, made.keys - 2**31
  calls = [dict(query_offset=2**30, is_causal=True)]
  calls += [dict(query_offset=jnp.int32(x), is_causal=False) for x in ends]
  for options in calls:
    options |= dict(logits_soft_cap=5.0)
    wanted = dict(output=formula(wide, options))
    with jax.enable_x64(False):
      arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), wide)
      for name in names:
        found = results(name, arrays, options | dict(local_window_size=2**31 - 1))
        wanted = found | wanted  # the gradients are those of the reference
        for of, x in found.items():
          error = jax.tree.map(relative_error, x, wanted[of])
          assert max(jax.tree.leaves(error)) < 1e-4, f"{of} of {name}, {options}"


def relative_error(x, wanted):
  return np.abs(x - wanted).max() / max(np.abs(wanted).max(), 1e-9)


# Law 20.
@pytest.mark.parametrize("name", ["reference", "projected", "per_position", "chunked"])
def test_positions_across_the_largest_integer_change_no_bit(name, monkeypatch):
  """Traces 32-bit integers that wrap around: their differences do not."""
  monkeypatch.setattr(blocks, "default_block", lambda *_: 4)
  made = RandomCall([*BY_DISTANCE, "function"], 6)
  near = dict(
    query_positions=made.integers(-9, 9, made.batch, made.queries),
    key_positions=made.integers(-9, 9, made.batch, made.keys),
  )
  found = []
  for shift in (0, 2**31 + 1, 2 * 10**9):
    for dtype in (np.int32, np.uint32):
      positions = {of: jnp.asarray((x + shift).astype(dtype)) for of, x in near.items()}
      options = positions | dict(is_causal=True, local_window_size=(7, 2))
      found.append(results(name, made.arrays, options))
  for other in found[1:]:
    jax.tree.map(np.testing.assert_array_equal, found[0], other)


def test_without_a_batch():
  arrays, options = random_call(KINDS, 5)
  relations, first = arrays.pop("more"), lambda x: x[0]
  single = jax.tree.map(first, arrays)
  edges = dict(labels=lambda x: x[0] if x.ndim == 3 else x, features=first, query=first)
  edges |= dict(of_query=first, of_pair=first)
  pick = lambda x: type(x)(
    **{name: edges.get(name, lambda y: y)(y) for name, y in vars(x).items()}
  )
  alone = tuple(map(pick, relations))
  per_row = {
    n: x[0] if isinstance(x, jax.Array) and x.ndim else x for n, x in options.items()
  }
  output = dot_product_attention(**single, **per_row, relations=alone)
  whole = dot_product_attention(**arrays, **options, relations=relations)
  np.testing.assert_allclose(output, whole[0], **TOLERANCE)


@pytest.mark.parametrize("name", ["reference", "skew", "chunked", "blocks", None])
@pytest.mark.parametrize("shared", [(1, 3, 1), (1, 1, 2), ()])
def test_any_number_of_batch_axes(name, shared, monkeypatch):
  """Shares a bias along some of three axes of the batch, and a mask along others."""
  monkeypatch.setattr(band, "_choose_sizes", lambda *_: (4, 7, None))
  monkeypatch.setattr(blocks, "default_block", lambda *_: 4)
  rng, batch, length = np.random.default_rng(0), (2, 3, 2), 7
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape))
  arrays = dict(
    query=normal(*batch, length, 4, 3), bias=normal(*shared, 4, length, length)
  )
  arrays |= dict(key=normal(*batch, length, 2, 3), value=normal(*batch, length, 2, 5))
  relations = [
    KeyBias(normal(3, 3)),
    ContentBias(normal(*batch, length, 4, 2), normal(5, 2)),
  ]
  if name not in ("skew", "chunked"):
    relations += [
      EdgeLabels(jnp.asarray(rng.integers(-1, 4, (*batch, 7, 7))), normal(4, 3), None)
    ]
    relations += [
      FunctionBias(lambda _, i, j, x, *__: x * j, of_query=normal(*batch, length))
    ]
  options = dict(query_offset=jnp.asarray(rng.integers(-3, 3, batch)))
  options |= dict(key_value_seq_lengths=jnp.asarray(rng.integers(3, 8, batch)))
  options |= dict(query_segment_ids=jnp.asarray(rng.integers(0, 2, (*batch, length))))
  options |= dict(key_segment_ids=jnp.arange(length) % 2, is_causal=True)
  options |= dict(mask=jnp.asarray(rng.random((2, 1, 2, 1, length, length)) < 0.8))
  options |= dict(dropout_rate=0.2, dropout_key=jax.random.key(0))
  full = jnp.broadcast_to(arrays["bias"], (*batch, 4, length, length))
  wide = jnp.broadcast_to(options["mask"], (*batch, 1, length, length))

  def merge_axes(x):
    return x.reshape(12, *x.shape[3:]) if jnp.shape(x)[:3] == batch else x

  arrays["more"] = tuple(relations)
  merged = jax.tree.map(
    merge_axes, (arrays | dict(bias=full), options | dict(mask=wide))
  )
  wanted = results("reference", *merged)
  sums = functools.partial(jnp.broadcast_to, shape=full.shape)
  (of_bias,) = jax.linear_transpose(sums, arrays["bias"])(
    wanted["bias"].reshape(full.shape)
  )
  wanted["bias"] = of_bias
  found = results("chunked" if name == "blocks" else name, arrays, options)
  assert found["output"].shape == (*batch, length, 4, 5)
  assert_close(
    found, jax.tree.map(lambda x, y: x.reshape(y.shape), wanted, found), name
  )


@pytest.mark.parametrize("mapped", ["query", "bias", "k"])
def test_vmap_over_several_batch_axes(mapped):
  rng = np.random.default_rng(0)
  shapes = dict(query=(2, 3, 5, 4, 3), key=(2, 3, 5, 2, 3), value=(2, 3, 5, 2, 4))
  shapes |= dict(bias=(2, 1, 4, 5, 5), k=(3, 3))
  arrays = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}

  def both(several, name):
    return with_gradients(
      lambda x: call(x, implementation=name), arrays | {mapped: several}
    )

  several = jnp.stack([arrays[mapped], 2 * arrays[mapped], arrays[mapped][..., ::-1]])
  found = quickly(jax.vmap(functools.partial(both, name="chunked")))(several)
  each = [quickly(functools.partial(both, name="reference"))(x) for x in several]
  assert_close(found, jax.tree.map(lambda *x: jnp.stack(x), *each))


# Law 14.
@pytest.mark.parametrize(
  "name", ["reference", "per_position", "projected", "chunked", None]
)
def test_a_sink_is_one_more_key_without_a_value(name, monkeypatch):
  monkeypatch.setattr(blocks, "default_block", lambda *_: 4)
  made = RandomCall(["numbers", "labels"], 3)
  q, k, v = (made.normal(2, 7, n, 3) for n in (4, 2, 2))
  floats = q, k, v, made.normal(5, 4), made.normal(5, 3), made.normal(4)
  labels, mask = made.integers(-1, 5, 7, 7), jnp.arange(7) % 3 != 1

  def attend(
    q, k, v, numbers, table, sinks, name=name, labels=labels, mask=mask, **options
  ):
    relations = LabelBias(labels, numbers), EdgeLabels(labels, table, table)
    options |= dict(relations=relations, mask=mask, sinks=sinks, implementation=name)
    return dot_product_attention(q, k, v, **options)

  def as_a_key(q, k, v, numbers, table, sinks):
    k, v = (jnp.pad(x, [(0, 0), (0, 1), (0, 0), (0, 0)]) for x in (k, v))
    options = dict(labels=jnp.pad(labels, [(0, 0), (0, 1)], constant_values=-1))
    options["mask"] = jnp.append(mask, True)
    options["bias"] = jnp.pad(sinks[:, None, None], [(0, 0), (0, 0), (7, 0)])
    return attend(q, k, v, numbers, table, None, "reference", **options)

  assert_close(with_gradients(attend, *floats), with_gradients(as_a_key, *floats))
  assert_close(*(attend(*floats[:-1], x) for x in (jnp.full(4, -jnp.inf), None)))
  assert not attend(*floats, key_value_seq_lengths=jnp.zeros(2, int)).any()


# Law 14.
@pytest.mark.parametrize("name", ["reference", "projected", "chunked", None])
def test_parts_of_the_keys_are_merged_by_their_residuals(name, monkeypatch):
  """One of three parts is hidden from all queries, another has the sinks; one query sees no key."""
  monkeypatch.setattr(blocks, "default_block", lambda *_: 4)
  made = RandomCall(["numbers", "labels"], 4)
  q, k, v = (made.normal(2, 7, n, 3) for n in (4, 2, 2))
  floats = q, k, v, made.normal(5, 3), made.normal(4)
  labels = made.integers(-1, 5, 7, 7)
  mask = (jnp.arange(7) % 5 != 0) & (jnp.arange(7)[:, None] != 3)

  def part(q, k, v, table, sinks, first=0, last=7, name="reference"):
    keys = slice(first, last)
    options = dict(
      relations=EdgeLabels(labels[:, keys], table, table), mask=mask[:, keys]
    )
    options |= dict(sinks=sinks, implementation=name, return_residual=True)
    return dot_product_attention(q, k[:, keys], v[:, keys], **options)

  def merged(q, k, v, table, sinks):
    splits = [(0, 1, None), (1, 4, sinks), (4, 7, None)]
    return merge(
      *zip(*(part(q, k, v, table, x, *at, name) for *at, x in splits), strict=True)
    )

  with jax.numpy_rank_promotion("raise"):
    jax.eval_shape(merged, *floats)
  actual, pull_back = jax.vjp(merged, *floats)
  wanted, wanted_pull_back = jax.vjp(part, *floats)
  cotangent = jax.tree.map(lambda x: jnp.cos(jnp.maximum(x, -9)), wanted)
  assert_close((actual, pull_back(cotangent)), (wanted, wanted_pull_back(cotangent)))
  hidden = part(*floats[:-1], None, 0, 1, name)
  assert not hidden[0].any() and np.isneginf(hidden[1]).all()


# Law 15.
@pytest.mark.parametrize("multiplied", [False, True])
@pytest.mark.parametrize("kind", ["distance", "numbers", "function"])
def test_numbers_of_minus_infinity_hide_as_a_mask_does(kind, multiplied, monkeypatch):
  """Gives one query no key, and no mask that would say so. Lookups on accelerators are products."""
  monkeypatch.setattr(blocks, "default_block", lambda *_: 4)
  if multiplied:
    look_up = lambda x, labels: lookup.multiply(labels, x)
    monkeypatch.setattr(lookup, "look_up", look_up)
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(7, 2, 3)))
  i, j = jnp.ogrid[:7, :7]
  hidden = (j - i < -2) if kind == "distance" else (i == 3) | (j == 2)
  keys = 3 if kind == "distance" else 7  # the last query is far from all of three

  def relation(low, table):
    if kind == "distance":
      return DistanceBias(jnp.full((7, 2), low).at[1:].set(table[:6]), left=3)
    if kind == "numbers":
      return LabelBias(jnp.where(hidden, 0, 1 + (i + j) % 4), table.at[0].set(low))
    number = lambda t, i, j, *_: jnp.where((i == 3) | (j == 2), low, t[i] * j)
    return FunctionBias(number, table)

  def call(x, table, low, mask, name):
    relations = relation(low, table)
    options = dict(mask=mask, relations=relations, implementation=name)
    return dot_product_attention(x, x[:keys], x[:keys], **options)

  table = jnp.asarray(rng.normal(size=(7, 2)))
  for name in ("reference", "per_position", "projected", "chunked", None):
    low, masked = (
      with_gradients(functools.partial(call, low=low, mask=mask, name=name), x, table)
      for low, mask in ((-jnp.inf, None), (0.0, ~hidden[:, :keys]))
    )
    assert_close(low, masked, str(name))
    assert not low[0][6 if kind == "distance" else 3].any()


@pytest.mark.parametrize("shape", [(6,), (4, 5, 6), (5, 1)], ids=str)
def test_masks_and_biases_of_lower_rank_are_broadcast(shape):
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape))
  arrays = dict(
    query=normal(2, 5, 4, 3), key=normal(2, 6, 4, 3), value=normal(2, 6, 4, 3)
  )
  arrays |= dict(k=normal(3, 3))
  run = lambda bias: call(arrays, bias=bias, mask=bias > -1)
  full = lambda x: x[(None,) * (4 - x.ndim)]
  bias = normal(*shape)
  assert_close(with_gradients(run, bias), with_gradients(lambda x: run(full(x)), bias))


ONES = jnp.ones((3, 4))


def second_and_forward_derivatives(x, relations, name):
  """Yields functions of two derivatives of the squared output."""

  def loss(x):
    options = dict(relations=relations, implementation=name)
    return (dot_product_attention(x, x, x, **options) ** 2).sum()

  yield lambda: jax.grad(lambda x: jnp.sin(jax.grad(loss)(x)).sum())(x)
  yield lambda: jax.jvp(loss, (x,), (jnp.cos(x),))[1]


def test_second_and_forward_derivatives_along_a_band_name_the_remedy():
  x, relations = jnp.ones((1, 300, 1, 4)), RelativePositions(ONES, None)
  for derivative in second_and_forward_derivatives(x, relations, "chunked"):
    with pytest.raises(NotImplementedError, match="name implementation='projected'"):
      derivative()
  for derivative in second_and_forward_derivatives(x, relations, "projected"):
    derivative()


def test_second_and_forward_derivatives_without_a_band(monkeypatch):
  monkeypatch.setattr(blocks, "default_block", lambda *_: 4)
  made = RandomCall(["labels"], 0)
  x, table = made.normal(1, 11, 2, 4), made.normal(3, 4)
  relations = EdgeLabels(made.integers(-1, 3, 11, 11), table, table)
  found, wanted = (
    [derivative() for derivative in second_and_forward_derivatives(x, relations, name)]
    for name in ("chunked", "projected")
  )
  assert_close(found, wanted)


# By implementation: the length, the arrays that it never forms, and relations that
# could need them.
NEVER_FORMED = dict(
  projected=(
    24,
    r"24,24,(\d,)?8\]|24,2,24,8\]",
    ["labels", "features", "content", "key"],
  ),
  chunked=(
    1024,
    r"2,1024,1024\]",
    ["positions", "labels", "features", "numbers", "function"],
  ),
)


@pytest.mark.parametrize(
  "name, kind",
  [(name, kind) for name, (*_, kinds) in NEVER_FORMED.items() for kind in kinds],
)
def test_neither_a_vector_of_each_pair_is_formed_nor_its_weight(name, kind):
  """Compiles both passes, without a band: only the call's own arrays are of all pairs."""
  length, pattern, _ = NEVER_FORMED[name]
  x, table, labels = (
    jnp.ones((1, length, 2, 8)),
    jnp.ones((5, 8)),
    jnp.zeros((length,) * 2, int),
  )
  relation = dict(
    positions=RelativePositions(table, table),
    labels=EdgeLabels(labels, table, table),
    features=EdgeFeatures(jnp.ones((length, length, 5)), table, table),
    numbers=LabelBias(labels, table[:, :2]),
    function=FunctionBias(lambda params, i, j, *_: params[j - i], table[:, :2]),
    content=ContentBias(x, table),
    key=KeyBias(table),
  )[kind]

  def loss(x, relation):
    options = dict(query_positions=jnp.arange(length), implementation=name)
    return dot_product_attention(x, x, x, relations=relation, **options).sum()

  compiled = (
    as_users_do(jax.grad(loss, (0, 1), allow_int=True)).lower(x, relation).compile()
  )
  assert not re.search(pattern, compiled.as_text())


def squares(attend):
  return lambda *arrays: (attend(*arrays) ** 2).sum()


def of_table(kind):
  options = dict(is_causal=True, implementation="chunked")
  return squares(
    lambda x, table: dot_product_attention(x, x, x, relations=kind(table), **options)
  )


def of_jax_nn(x, bias):
  flat = x.reshape(-1, *x.shape[-3:])
  if bias.ndim == 5:
    bias = bias.repeat(16, 1).reshape(-1, *bias.shape[-3:])
  return jax.nn.dot_product_attention(flat, flat, flat, bias)


BIAS = (
  squares(lambda x, bias: dot_product_attention(x, x, x, bias)),
  squares(of_jax_nn),
  0.8,
)
KEY_BIAS = (
  of_table(KeyBias),
  of_table(lambda table: RelativePositions(table, None)),
  1.2,
)


@pytest.mark.parametrize(
  "losses, shapes",
  [
    (BIAS, [(64, 64, 4, 8), (1, 4, 64, 64)]),
    (BIAS, [(4, 16, 64, 4, 8), (4, 1, 4, 64, 64)]),
    (BIAS, [(1, 1024, 1, 8), (1024, 1024)]),
    # No number for every row and every token.
    (KEY_BIAS, [(1, 2048, 2, 16), (513, 2, 16)]),
  ],
)
def test_biases_take_less_memory_than_jax_nn_and_key_biases_little_more_than_positions(
  losses, shapes
):
  """Compiles both passes."""
  arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  *losses, share = losses

  def memory(loss):
    compiled = as_users_do(jax.grad(loss, (0, 1))).lower(*arrays).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  ours, usual = map(memory, losses)
  assert ours < share * usual and (share < 1 or ours < 513 * 2048 * 2 * 16)
