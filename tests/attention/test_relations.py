"""Labelled and featured edges."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import as_users_do

from relpos_jax import EdgeFeatures, EdgeLabels, RelativePositions, dot_product_attention

pytestmark = pytest.mark.usefixtures("float64")

K, T, S = 2, 6, 7
ANY_RELATION = ["reference", "per_position", "projected", None]
LABELS = np.clip(np.arange(S) - np.arange(T)[:, None], -K, K) + K


def random(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed + len(shape)).normal(size=shape))


def results(relation, tables, implementation, **options):
  """Returns the output, and all gradients for a random cotangent."""

  @jax.jit
  def run(arrays, tables):
    call = lambda arrays, tables: dot_product_attention(
      *arrays, relations=relation(*tables), implementation=implementation, **options
    )
    output, pull_back = jax.vjp(call, arrays, tables)
    return output, pull_back(random(*output.shape, seed=7))

  return run((random(2, T, 4, 3), random(2, S, 2, 3), random(2, S, 2, 3, seed=1)), tables)


def assert_equal(actual, wanted):
  for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-10)


def tables_of(heads=()):
  return random(2 * K + 1, *heads, 3), random(2 * K + 1, *heads, 3, seed=1)


# Law 8.
@pytest.mark.parametrize("implementation", ANY_RELATION)
@pytest.mark.parametrize("heads, beyond", [((), "zero"), ((4,), "clip")])
def test_clipped_distances_as_labels_are_relative_positions(implementation, heads, beyond):
  rows = np.arange(S) - np.arange(T)[:, None] + K
  labels = LABELS if beyond == "clip" else np.where(rows == LABELS, LABELS, -1)
  relative = functools.partial(RelativePositions, beyond=beyond)
  labelled = functools.partial(EdgeLabels, labels)
  options = dict(is_causal=True, bias=random(2, 1, T, S))
  assert_equal(
    results(labelled, tables_of(heads), implementation, **options),
    results(relative, tables_of(heads), "reference", **options),
  )


@pytest.mark.parametrize("implementation", ANY_RELATION)
def test_one_hot_features_are_labels(implementation, heads=(4,)):
  labels = np.random.default_rng(0).integers(-1, 2 * K + 1, (2, T, S))
  one_hot = jax.nn.one_hot(labels, 2 * K + 1, dtype=jnp.float64)  # -1 is no feature at all
  assert_equal(
    results(functools.partial(EdgeFeatures, one_hot), tables_of(heads), implementation),
    results(functools.partial(EdgeLabels, labels), tables_of(heads), "reference"),
  )


def test_projected_never_forms_a_vector_for_every_pair():
  heads, width = 4, 32
  arrays = [jax.ShapeDtypeStruct((2, 24, heads, width), jnp.float32)] * 3
  table = jax.ShapeDtypeStruct((5, width), jnp.float32)
  labels = jax.ShapeDtypeStruct((2, 24, 24), jnp.int32)
  features = jax.ShapeDtypeStruct((2, 24, 24, 5), jnp.float32)
  for relation, edges in ((EdgeLabels, labels), (EdgeFeatures, features)):
    loss = lambda arrays, edges, table, relation=relation: dot_product_attention(
      *arrays, relations=relation(edges, table, table), implementation="projected"
    ).sum()
    compiled = as_users_do(jax.grad(loss, argnums=(0, 2))).lower(arrays, edges, table).compile()
    assert "24,24,32]" not in compiled.as_text()
    assert "24,24,4,32]" not in compiled.as_text()


def test_traced_labels_are_clamped():
  run = jax.jit(
    lambda labels: dot_product_attention(
      *(random(2, T, 4, 3), random(2, S, 2, 3), random(2, S, 2, 3)),
      relations=EdgeLabels(labels, *tables_of()),
    )
  )
  np.testing.assert_array_equal(run(jnp.full((T, S), 9)), run(jnp.full((T, S), 2 * K)))


@pytest.mark.parametrize("name", ["skew", "chunked", "pallas_tpu", "pallas_gpu"])
def test_the_others_refuse_edges_by_name(name):
  query, key, relations = np.ones((T, 4, 3)), np.ones((S, 2, 3)), EdgeLabels(LABELS, *tables_of())
  with pytest.raises(NotImplementedError, match=f"'{name}' cannot do this call: relations is Edge"):
    dot_product_attention(query, key, key, relations=relations, implementation=name)
