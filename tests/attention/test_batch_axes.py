"""Any number of batch axes, along some of which arrays are shared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import call, results, set_tiles
from comparing import assert_close
from compiling import compile_quickly, with_gradients

from relpos_jax import ContentBias, EdgeLabels, FunctionBias, KeyBias

pytestmark = pytest.mark.usefixtures("float64")

BATCH, LENGTH, HEADS = (2, 3, 2), 7, 4
RANDOM = np.random.default_rng(0)


def normal(*shape):
  return RANDOM.normal(size=shape)


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
OPTIONS = {
  "query_offset": integers(-3, 3, *BATCH),
  "key_value_seq_lengths": integers(3, 8, *BATCH),
  "query_segment_ids": integers(0, 2, *BATCH, LENGTH),
  "key_segment_ids": jnp.arange(LENGTH) % 2,
  "is_causal": True,
  "mask": jnp.asarray(RANDOM.random((2, 1, 2, 1, LENGTH, LENGTH)) < 0.8),
  "dropout_rate": 0.2,
  "dropout_key": jax.random.key(0),
}


def merge_axes(x):
  return x.reshape(-1, *x.shape[3:]) if jnp.shape(x)[:3] == BATCH else x


@pytest.mark.parametrize("name", ["reference", "skew", "chunked", "blocks"])
@pytest.mark.parametrize("shared", [(1, 3, 1), (1, 1, 2), ()], ids=str)
def test_any_number_of_batch_axes(name, shared, monkeypatch):
  """Shares a bias along some of three axes of the batch, and a mask along others."""
  set_tiles(monkeypatch, 4, 7)
  more = BY_DISTANCE if name in ("skew", "chunked") else BY_DISTANCE + OF_PAIRS
  bias = jnp.asarray(np.random.default_rng(1).normal(size=(*shared, HEADS, 7, 7)))
  each, pull_back = jax.vjp(lambda x: jnp.broadcast_to(x, (*BATCH, HEADS, 7, 7)), bias)
  mask = jnp.broadcast_to(OPTIONS["mask"], (*BATCH, 1, LENGTH, LENGTH))
  arrays = ARRAYS | {"more": more, "bias": bias}
  merged = jax.tree.map(merge_axes, (arrays | {"bias": each}, OPTIONS | {"mask": mask}))
  wanted = results("reference", *merged)
  (wanted["bias"],) = pull_back(wanted["bias"].reshape(each.shape))

  actual = results("chunked" if name == "blocks" else name, arrays, OPTIONS)

  assert actual["output"].shape == (*BATCH, LENGTH, HEADS, 5)
  wanted = jax.tree.map(lambda x, y: x.reshape(y.shape), wanted, actual)
  assert_close(actual, wanted, name)


@pytest.mark.parametrize("mapped", ["query", "bias", "k"])
def test_vmap_over_several_batch_axes(mapped):
  arrays = {
    "query": normal(2, 3, 5, 4, 3),
    "key": normal(2, 3, 5, 2, 3),
    "value": normal(2, 3, 5, 2, 4),
    "bias": normal(2, 1, 4, 5, 5),
    "k": normal(3, 3),
  }

  def run(name, x):
    attend = functools.partial(call, implementation=name)
    return with_gradients(attend, arrays | {mapped: x})

  x = arrays[mapped]
  several = jnp.stack([x, 2 * x, x[..., ::-1]])
  actual = compile_quickly(jax.vmap(functools.partial(run, "chunked")))(several)
  by_reference = compile_quickly(functools.partial(run, "reference"))
  each = [by_reference(x) for x in several]
  assert_close(actual, jax.tree.map(lambda *x: jnp.stack(x), *each))
