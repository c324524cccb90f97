"""Law 14: sinks are a key without a value, and parts of the keys are merged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import set_tiles
from comparing import assert_close
from compiling import with_gradients

from relpos_jax import EdgeLabels, LabelBias, dot_product_attention, merge

RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(-1, 5, (7, 7))

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def tensors():
  return [jnp.asarray(RANDOM.normal(size=(2, 7, heads, 3))) for heads in (4, 2, 2)]


@pytest.mark.parametrize(
  "name", ["reference", "per_position", "projected", "chunked", None]
)
def test_a_sink_is_one_more_key_without_a_value(name, tensors, monkeypatch):
  set_tiles(monkeypatch, 4)
  attends = np.arange(7) % 3 != 1
  numbers, table, sinks = (RANDOM.normal(size=x) for x in ((5, 4), (5, 3), (4,)))

  def attend(name, labels, mask, q, k, v, numbers, table, **options):
    relations = LabelBias(labels, numbers), EdgeLabels(labels, table, table)
    options |= {"relations": relations, "mask": mask, "implementation": name}
    return dot_product_attention(q, k, v, **options)

  def with_sinks(q, k, v, numbers, table, sinks, **options):
    options["sinks"] = sinks
    return attend(name, LABELS, attends, q, k, v, numbers, table, **options)

  def with_one_more_key(q, k, v, numbers, table, sinks):
    k, v = (jnp.pad(x, [(0, 0), (0, 1), (0, 0), (0, 0)]) for x in (k, v))
    labels = np.pad(LABELS, [(0, 0), (0, 1)], constant_values=-1)
    mask = np.append(attends, True)
    bias = jnp.pad(sinks[:, None, None], [(0, 0), (0, 0), (7, 0)])
    return attend("reference", labels, mask, q, k, v, numbers, table, bias=bias)

  without = *tensors, numbers, table
  arrays = *without, sinks
  wanted = with_gradients(with_one_more_key, *arrays)
  assert_close(with_gradients(with_sinks, *arrays), wanted)
  none = np.full(4, -np.inf)
  assert_close(with_sinks(*without, none), with_sinks(*without, None))
  assert not with_sinks(*arrays, key_value_seq_lengths=np.zeros(2, int)).any()


@pytest.mark.parametrize("name", ["reference", "projected", "chunked", None])
def test_parts_of_the_keys_are_merged_by_their_residuals(name, tensors, monkeypatch):
  """All queries mask one of three parts, another has the sinks; a query is masked."""
  set_tiles(monkeypatch, 4)
  table, sinks = RANDOM.normal(size=(5, 3)), RANDOM.normal(size=4)
  mask = (np.arange(7) % 5 != 0) & (np.arange(7)[:, None] != 3)

  def part(name, keys, q, k, v, table, sinks):
    relations = EdgeLabels(LABELS[:, keys], table, table)
    options = {"sinks": sinks, "implementation": name, "return_residual": True}
    options |= {"relations": relations, "mask": mask[:, keys]}
    return dot_product_attention(q, k[:, keys], v[:, keys], **options)

  def merged(q, k, v, table, sinks):
    part_without_sinks = functools.partial(part, name, sinks=None)
    parts = [
      part_without_sinks(slice(0, 1), q, k, v, table),
      part(name, slice(1, 4), q, k, v, table, sinks),
      part_without_sinks(slice(4, 7), q, k, v, table),
    ]
    return merge(*zip(*parts, strict=True))

  arrays = *tensors, table, sinks
  with jax.numpy_rank_promotion("raise"):
    jax.eval_shape(merged, *arrays)
  actual, pull_back = jax.vjp(merged, *arrays)
  whole = functools.partial(part, "reference", slice(None))
  wanted, wanted_pull_back = jax.vjp(whole, *arrays)
  cotangent = jax.tree.map(lambda x: jnp.cos(jnp.maximum(x, -9)), wanted)
  assert_close(actual, wanted)
  assert_close(pull_back(cotangent), wanted_pull_back(cotangent))
  output, residual = part(name, slice(0, 1), *tensors, table, None)
  assert not output.any()
  assert np.isneginf(residual).all()
