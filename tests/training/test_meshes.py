"""Results do not depend on the mesh; between devices moves what must, no more."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from compiling import fill
from flax import nnx
from test_step import DROPOUT, SGD, copy_task, make_model, smoothed

from experiments.graphs.graph import Graph, GraphBatches
from experiments.graphs.train import loss as loss_of_graphs
from experiments.training.sharding import (
  AXES,
  make_mesh,
  parameter_sharding,
  put_batch,
  use_ring,
)
from experiments.training.step import init_state, make_train_step
from relpos_jax.models.graph_encoder import GraphEncoder, GraphEncoderConfig

MESHES = [(4, 1, 2, 1), (1, 8, 1, 1), (1, 1, 1, 8), (1, 2, 2, 2)]
# What moves along an axis besides sums. Along a sequence: keys, a token to the right
# and, in short sequences, heads in place of tokens.
EXPECTED = {
  "data": set(),
  "fsdp": {"all-gather", "reduce-scatter"},
  "tensor": set(),
  "sequence": {"all-gather", "reduce-scatter", "collective-permute", "all-to-all"},
}
KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


class Case(NamedTuple):
  """Holds the graph and shapes of a model, its loss, and a batch."""

  model: Any
  loss: Callable
  batch: Any
  size: float  # of the parameters


def step_on(sizes, case: Case):
  """Takes a step; returns the state, the loss and the kinds of transfers."""
  mesh = make_mesh(**dict(zip(AXES, sizes, strict=True)))
  graphdef, shapes = case.model
  step = make_train_step(graphdef, case.loss, SGD)
  with jax.set_mesh(mesh):
    state = init_state(fill(shapes, case.size), SGD)
    state = jax.device_put(state, parameter_sharding(state, mesh))
    batch = put_batch(case.batch, mesh)
    compiled = step.lower(state, batch).compile()
    after, metrics = compiled(state, batch)
  kinds = re.findall(rf" ({KINDS})(?:-start)?\(", compiled.as_text())
  return (after, metrics["loss"]), {*kinds}


@functools.cache
def translation() -> Case:
  return Case(make_model(**DROPOUT), smoothed, copy_task(0), 0.2)


def graph(number: int) -> Graph:
  random = np.random.default_rng(number)
  edges = random.integers(0, number, (3 * number, 3)) % [number, number, 3]
  features = random.normal(size=(len(edges), 1))
  nodes = random.integers(0, 2, number)
  return Graph.from_edges(nodes, edges, target=number % 2, edge_features=features)


SIZES = dict(num_node_labels=2, num_edge_labels=3, num_classes=2, num_edge_features=1)
SIZES |= dict(num_layers=1, width=8, num_heads=2, feed_forward=8)


@functools.cache
def graphs(implementation: str | None = None) -> Case:
  some = [graph(number) for number in (7, 6, 5, 4, 4, 3, 2)]
  options = dict(boundaries=(8,), budget=64, multiple_of=8)
  batch = GraphBatches(some, seed=None, **options)[0]
  config = GraphEncoderConfig(**SIZES, implementation=implementation)
  model = nnx.eval_shape(lambda: GraphEncoder(config, rngs=nnx.Rngs(0)))
  return Case(nnx.split(model), loss_of_graphs, batch, 0.6)


@functools.cache
def on_one_device(case: Callable[[], Case]):
  return step_on((1, 1, 1, 1), case())[0]


def assert_as_on_one_device(found, case: Callable[[], Case]):
  wanted = on_one_device(case)
  for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", MESHES)
def test_a_mesh_gives_one_devices_loss_and_gradients(sizes):
  found, kinds = step_on(sizes, translation())
  assert_as_on_one_device(found, translation)
  expected = {"all-reduce"}
  for name, size in zip(AXES, sizes, strict=True):
    if size > 1:
      expected |= EXPECTED[name]
  assert kinds <= expected


def test_a_ring_gives_one_devices_loss_and_gradients():
  case = translation()._replace(loss=use_ring(smoothed))
  found, kinds = step_on((1, 1, 2, 4), case)
  assert_as_on_one_device(found, translation)
  assert kinds <= {"all-reduce", "collective-permute"}


@pytest.mark.parametrize(
  "sizes, implementation",
  [((8, 1, 1, 1), None), ((2, 2, 2, 1), None), ((2, 2, 2, 1), "edge_list")],
)
def test_a_mesh_gives_one_devices_loss_and_gradients_of_graphs(sizes, implementation):
  found, kinds = step_on(sizes, graphs(implementation))
  assert_as_on_one_device(found, graphs)
  if sizes[0] == 8:
    assert "all-gather" not in kinds
