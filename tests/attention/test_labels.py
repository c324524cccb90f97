"""Traced labels beyond a table are clamped, and NaN under `jax.debug_nans`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import compile_quickly
from numpy.testing import assert_array_equal

from relpos_jax import EdgeLabels, LabelBias, dot_product_attention, edge_attention
from relpos_jax.attention.edges import pair_features

pytestmark = pytest.mark.usefixtures("float64")
RNG = np.random.default_rng(0)
NUM_ROWS, NUM_NODES = 5, 9
TABLE = RNG.normal(size=(NUM_ROWS, 3))
TOKENS = RNG.normal(size=(3, 2, NUM_NODES, 4, 3))
LABELS = RNG.integers(-1, NUM_ROWS, (2, NUM_NODES, NUM_NODES))
SENDERS, RECEIVERS = RNG.integers(0, NUM_NODES, (2, 2, 20))
LABELS_OF_EDGES = RNG.integers(-1, NUM_ROWS, (2, 20))


def check_labels_beyond_the_table(attend, labels):
  compiled = compile_quickly(attend)
  to_debug = compile_quickly(functools.partial(attend))
  for wrong in (NUM_ROWS, -2):
    beyond = np.array(labels)
    beyond.flat[3] = wrong
    clamped = np.clip(beyond, -1, NUM_ROWS - 1)
    assert_array_equal(compiled(beyond), compiled(clamped))
    with jax.debug_nans(True):
      to_debug(clamped)
      # JAX calls the function once more, without tracing, to find the NaN.
      with pytest.raises((FloatingPointError, ValueError), match=r"nan|labels go from"):
        to_debug(beyond)


@pytest.mark.parametrize(
  "make",
  [
    lambda labels: EdgeLabels(labels, TABLE, None),
    lambda labels: EdgeLabels(labels, None, TABLE),
    lambda labels: LabelBias(labels, TABLE[:, 0]),
  ],
  ids=["vectors of keys", "vectors of values", "numbers"],
)
@pytest.mark.parametrize("implementation", ["reference", "projected"])
def test_of_pairs(make, implementation):
  def attend(labels):
    options = {"relations": make(labels), "implementation": implementation}
    return dot_product_attention(*TOKENS, **options)

  check_labels_beyond_the_table(attend, LABELS)


@pytest.mark.parametrize("tables", [(TABLE, None), (None, TABLE)], ids=["key", "value"])
def test_of_edges(tables):
  def attend(labels):
    relation = EdgeLabels(labels, *tables)
    return edge_attention(*TOKENS, SENDERS, RECEIVERS, labels=relation)

  check_labels_beyond_the_table(attend, LABELS_OF_EDGES)


def test_of_the_features_of_pairs():
  def features(labels):
    edges = *map(jnp.asarray, (SENDERS, RECEIVERS, labels)), jnp.zeros((2, 20, 0))
    return pair_features(*edges, num_labels=NUM_ROWS, num_nodes=NUM_NODES)[0]

  check_labels_beyond_the_table(features, LABELS_OF_EDGES)
