"""No batch axis or several, along some of which arrays are shared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import call, normal, results, set_tiles
from comparing import assert_close

from relpos_jax import ContentBias, EdgeLabels, FunctionBias, KeyBias

pytestmark = pytest.mark.usefixtures("float64")

BATCH, LENGTH, HEADS = (2, 3, 2), 7, 4
RANDOM = np.random.default_rng(0)


def integers(low, high, *shape):
  return jnp.asarray(RANDOM.integers(low, high, shape))


def number_of_key(params, i, j, x, *_):
  return x * j


ARRAYS = {
  "query": normal(*BATCH, LENGTH, HEADS, 3),
  "key": normal(*BATCH, LENGTH, 2, 3),
  "value": normal(*BATCH, LENGTH, 2, 5),
}
BY_DISTANCE = (
  KeyBias(normal(3, 3)),
  ContentBias(normal(*BATCH, LENGTH, HEADS, 2), normal(5, 2)),
)
OF_PAIRS = (
  EdgeLabels(integers(-1, 4, *BATCH, LENGTH, LENGTH), normal(4, 3), None),
  FunctionBias(number_of_key, of_query=normal(*BATCH, LENGTH)),
)
SEGMENTS = {
  "query_segment_ids": integers(0, 2, *BATCH, LENGTH),
  "key_segment_ids": jnp.arange(LENGTH) % 2,
}
OFFSETS = {
  "query_offset": integers(-3, 3, *BATCH),
  "key_value_seq_lengths": integers(3, 8, *BATCH),
}
MASK = jnp.asarray(RANDOM.random((2, 1, 2, 1, LENGTH, LENGTH)) < 0.8)
DROPOUT = {"dropout_rate": 0.2, "dropout_key": jax.random.key(0)}
OPTIONS = {"is_causal": True, "mask": MASK} | SEGMENTS | OFFSETS | DROPOUT


def merge_axes(x):
  return x.reshape(-1, *x.shape[3:]) if jnp.shape(x)[:3] == BATCH else x


# Along which axes of the batch a bias has its own numbers.
MIDDLE, LAST = (1, 3, 1), (1, 1, 2)


@pytest.mark.parametrize(
  "name, more, heads, shared",
  [
    ("reference", BY_DISTANCE + OF_PAIRS, None, MIDDLE),
    ("skew", BY_DISTANCE, None, LAST),
    ("chunked", BY_DISTANCE, None, MIDDLE),
    ("chunked", BY_DISTANCE, None, LAST),
    ("chunked", BY_DISTANCE, 2, MIDDLE),
    ("chunked", BY_DISTANCE, 2, LAST),
    ("chunked", BY_DISTANCE + OF_PAIRS, None, MIDDLE),
  ],
  ids=[
    "reference",
    "skew",
    "chunked, middle",
    "chunked, last",
    "by heads, middle",
    "by heads, last",
    "blocks",
  ],
)
def test_any_number_of_batch_axes(name, more, heads, shared, monkeypatch):
  """Shares a bias along some of three axes of the batch, and a mask along others."""
  set_tiles(monkeypatch, 4, 7, heads)
  bias = jnp.asarray(normal(*shared, HEADS, 7, 7))
  each, pull_back = jax.vjp(lambda x: jnp.broadcast_to(x, (*BATCH, HEADS, 7, 7)), bias)
  mask = jnp.broadcast_to(MASK, (*BATCH, 1, LENGTH, LENGTH))
  arrays = ARRAYS | {"more": more, "bias": bias}
  merged = jax.tree.map(merge_axes, (arrays | {"bias": each}, OPTIONS | {"mask": mask}))
  wanted = results("reference", *merged)
  (wanted["bias"],) = pull_back(wanted["bias"].reshape(each.shape))

  actual = results(name, arrays, OPTIONS)

  assert actual["output"].shape == (*BATCH, LENGTH, HEADS, 5)
  wanted = jax.tree.map(lambda x, y: x.reshape(y.shape), wanted, actual)
  assert_close(actual, wanted, name)


def first_sequence(x):
  return x[0, 0, 0] if jnp.shape(x)[:3] == BATCH else x


def test_a_sequence_without_a_batch():
  mask = jnp.broadcast_to(MASK, (*BATCH, 1, LENGTH, LENGTH))
  arguments = ARRAYS | {"more": BY_DISTANCE + OF_PAIRS, "mask": mask}
  arguments |= {"is_causal": True} | SEGMENTS | OFFSETS
  alone = call(jax.tree.map(first_sequence, arguments))
  assert_close(alone, call(arguments)[0, 0, 0])
