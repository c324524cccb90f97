"""Law 14: sinks are a key without a value, and parts of the keys are merged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import ANY_RELATION, normal, set_tiles
from comparing import assert_close
from compiling import compile_quickly, run_with_gradients

from relpos_jax import (
  DistanceBias,
  EdgeLabels,
  LabelBias,
  dot_product_attention,
  merge,
)

LABELS = np.random.default_rng(0).integers(-1, 5, (7, 7))

pytestmark = pytest.mark.usefixtures("float64")

TENSORS = normal(2, 7, 4, 3), *normal(2, 2, 7, 2, 3)
TABLE, SINKS = normal(5, 3), normal(4)


def test_a_sink_is_one_more_key_without_a_value(monkeypatch):
  set_tiles(monkeypatch, 4)
  attends = np.arange(7) % 3 != 1

  def attend(name, labels, q, k, v, numbers, table, **options):
    relations = LabelBias(labels, numbers), EdgeLabels(labels, table, table)
    options |= {"relations": relations, "implementation": name}
    return dot_product_attention(q, k, v, **options)

  def with_sinks(name, *arrays, **options):
    *arrays, sinks = arrays
    return attend(name, LABELS, *arrays, sinks=sinks, mask=attends, **options)

  def with_one_more_key(q, k, v, numbers, table, sinks):
    axes = (0, 0), (0, 1), (0, 0), (0, 0)
    k, v = jnp.pad(k, axes), jnp.pad(v, axes)
    labels = np.pad(LABELS, [(0, 0), (0, 1)], constant_values=-1)
    bias = jnp.pad(sinks[:, None, None], [(0, 0), (0, 0), (7, 0)])
    options = {"mask": np.append(attends, True), "bias": bias}
    return attend("reference", labels, q, k, v, numbers, table, **options)

  without_sinks = *TENSORS, normal(5, 4), TABLE
  arrays = *without_sinks, SINKS
  wanted = run_with_gradients(with_one_more_key, *arrays)
  for name in ANY_RELATION:
    call = functools.partial(with_sinks, name)
    assert_close(run_with_gradients(call, *arrays), wanted, name)
    low, none = call(*without_sinks, np.full(4, -np.inf)), call(*without_sinks, None)
    assert_close(low, none, name)
    assert not call(*arrays, key_value_seq_lengths=np.zeros(2, int)).any()


def run_with_residual(call, *arrays):
  """Returns results and gradients; cotangents are NaN where a residual is -inf.

  They come from `jnp.where(jnp.isneginf(x), 0, x**2)`, and must have no effect.
  """

  @compile_quickly
  def run(*arrays):
    results, pull_back = jax.vjp(call, *arrays)
    cotangent = jax.tree.map(
      lambda x: jnp.where(jnp.isneginf(x), jnp.nan, jnp.cos(x)), results
    )
    return results, pull_back(cotangent)

  with jax.numpy_rank_promotion("raise"):
    return run(*arrays)


KEYS_OF_PARTS = slice(0, 1), slice(1, 4), slice(4, 7)


def test_parts_of_the_keys_are_merged_by_their_residuals(monkeypatch):
  """All queries mask one of three parts, another has the sinks; a query is masked."""
  set_tiles(monkeypatch, 4)
  mask = (np.arange(7) % 5 != 0) & (np.arange(7)[:, None] != 3)

  def part(name, keys, q, k, v, table, sinks):
    relations = EdgeLabels(LABELS[:, keys], table, table)
    options = {"sinks": sinks, "implementation": name, "return_residual": True}
    options |= {"relations": relations, "mask": mask[:, keys]}
    return dot_product_attention(q, k[:, keys], v[:, keys], **options)

  def merged(name, *arrays):
    *without_sinks, sinks = arrays
    parts = []
    for keys, own_sinks in zip(KEYS_OF_PARTS, (None, sinks, None), strict=True):
      parts.append(part(name, keys, *without_sinks, own_sinks))
    return merge(*zip(*parts, strict=True))

  arrays = *TENSORS, TABLE, SINKS
  whole = functools.partial(part, "reference", slice(None))
  wanted = run_with_residual(whole, *arrays)
  for name in ("reference", "chunked"):
    actual = run_with_residual(functools.partial(merged, name), *arrays)
    assert_close(actual, wanted, name)
    output, residual = part(name, KEYS_OF_PARTS[0], *TENSORS, TABLE, None)
    assert not output.any()
    assert np.isneginf(residual).all()


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("name", ["reference", "chunked"])
def test_a_masked_query_along_a_band_has_no_residual(name, sinks):
  is_masked = np.arange(7) == 3
  attend = functools.partial(
    dot_product_attention,
    relations=DistanceBias(TABLE[:, 0]),
    mask=np.broadcast_to(~is_masked[:, None], (7, 7)),
    sinks=sinks,
    implementation=name,
    return_residual=True,
  )
  (_, residual), gradients = run_with_residual(attend, *TENSORS)
  np.testing.assert_array_equal(np.isneginf(residual[:, :, 0]), [is_masked] * 2)
  for gradient in gradients:
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("outputs, residuals", [(2, 1), (1, 2)])
def test_merge_takes_as_many_residuals_as_outputs(outputs, residuals):
  q, k, v = TENSORS
  output, residual = dot_product_attention(q, k, v, return_residual=True)
  with pytest.raises(ValueError, match=r"outputs have shape .* for X parts"):
    merge([output] * outputs, [residual] * residuals)
