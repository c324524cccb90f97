"""A sentence is a labelled graph: every word sees every other, the label is the clipped distance.

Shaw et al. 2018, section 3.2, after 3.1.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiling import quickly
from flax import nnx

from relpos_jax import EdgeLabels
from relpos_jax.models.seq2seq import Transformer, TransformerConfig

pytestmark = pytest.mark.usefixtures("float64")

K, LENGTH, STEPS = 2, 7, 5


class Graph(nnx.Module):
  """The same tables as a distance's, of edges that are labelled by hand."""

  def __init__(self, tables, labels):
    self.key, self.value = tables.key, tables.value
    self.labels = labels

  def __call__(self):
    return EdgeLabels(np.array(self.labels), self.key[...], self.value[...])


# The edge from word i to word j.
LABELS = tuple(tuple(max(-K, min(K, j - i)) + K for j in range(LENGTH)) for i in range(LENGTH))


def make(labels=None) -> Transformer:
  """One layer on each side, in float64; its sentences graphs if edges are labelled."""
  config = TransformerConfig(
    11, 11, num_layers=1, width=8, num_heads=2, feed_forward=8, max_distance=K
  )
  object.__setattr__(config, "dtype", "float64")  # no switch of the model: for this test alone
  model = Transformer(config, rngs=nnx.Rngs(0))
  for layer in (*model.encoder.layers, *model.decoder.layers) if labels else ():
    layer.self_attention.tables = Graph(layer.self_attention.tables, labels)
  return model


def train(model: Transformer):
  """The loss of each step, and the parameters at the end."""
  graphdef, params = nnx.split(model)
  params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
  optimizer = optax.adam(0.01)
  source, target = np.random.default_rng(0).integers(1, 11, (2, STEPS, 3, LENGTH))

  @quickly
  def run(params):
    def step(carry, batch):
      def loss(params):
        logits = nnx.merge(graphdef, params)(*batch).astype(jnp.float64)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[0]).mean()

      params, state = carry
      found, gradient = jax.value_and_grad(loss)(params)
      updates, state = optimizer.update(gradient, state, params)
      return (optax.apply_updates(params, updates), state), found

    carry, losses = jax.lax.scan(step, (params, optimizer.init(params)), (source, target))
    return losses, carry[0]

  losses, params = run(params)
  return losses, dict(nnx.to_flat_state(params))


def test_edge_labels_of_clipped_distances_train_step_for_step_like_relative_positions():
  (losses, params), (losses_of_graphs, params_of_graphs) = train(make()), train(make(LABELS))
  assert len({*losses.tolist()}) == STEPS
  np.testing.assert_allclose(losses_of_graphs, losses, rtol=0, atol=1e-8)
  assert params.keys() == params_of_graphs.keys()
  for path, leaf in params.items():
    np.testing.assert_allclose(params_of_graphs[path][...], leaf[...], rtol=0, atol=1e-8)
