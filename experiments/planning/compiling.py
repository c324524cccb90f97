"""The training step of a config, compiled for given chips, and its compiler's account of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from experiments.planning import collectives, language
from experiments.run import batch_maker, plan_model
from experiments.train import make_optimizer, make_step
from relpos_jax.data.batching import Batch, Batches, pair_lengths
from relpos_jax.data.ragged import Ragged
from relpos_jax.data.tokenizer import UNK
from relpos_jax.training.sharding import AnyMesh, of_batches, shapes_on
from relpos_jax.training.step import TrainState, init_state

Shape = tuple[int, int]

_NUM_PAIRS = 100_000


def shapes_of(config: ConfigDict, mesh: AnyMesh) -> list[Shape]:
  """The shapes [rows, tokens] of a config's batches, those of the longest sequences last."""
  if language.is_language_model(config):
    return [language.shape_of_batches(config, mesh)]
  return mock_batches(config, mesh).shapes


def mock_batches(config: ConfigDict, mesh: AnyMesh) -> Batches:
  """Batches of sentences that nobody wrote, of the shapes that such lengths get in training.

  Pairs of log-normal lengths around 24 tokens, the target's by a fifth longer or shorter: not
  those of any corpus, whose boundaries will differ by some tokens.
  """
  random = np.random.default_rng(0)
  lengths = random.lognormal(np.log(24), 0.6, _NUM_PAIRS)
  sides = lengths, lengths * random.lognormal(0, 0.2, _NUM_PAIRS)
  rows = [np.clip(side, 2, None).astype(int) for side in sides]
  pairs = [Ragged.joined(np.full(side.sum(), UNK, np.uint16), side) for side in rows]
  return batch_maker(config, pair_lengths(*pairs), mesh)(*pairs, seed=config.seed)


def first_state(config: ConfigDict, mesh: AnyMesh) -> tuple[Any, TrainState]:
  """The model and, as shapes on a mesh, the state before the first step of its training."""
  if language.is_language_model(config):
    graphdef, params = language.plan_language_model(config)
  else:
    graphdef, params = plan_model(config, *[config.vocabulary.size] * 2)
  start = lambda params: init_state(params, make_optimizer(config))
  return graphdef, shapes_on(mesh, jax.eval_shape(start, params))


def batch_of(shape: Shape, mesh: AnyMesh) -> Batch:
  """A batch of [rows, tokens] as shapes, as training puts it on a mesh."""
  tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=of_batches(mesh))
  return Batch(tokens, tokens)


def compile_step(config: ConfigDict, mesh: jax.sharding.Mesh, shape: Shape):
  """The training step for batches of [rows, tokens], compiled for the devices of a mesh.

  They need not be there. It is what they would run: the mesh is in context, so that attention is
  chosen for its platform.
  """
  graphdef, state = first_state(config, mesh)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    return make_step(config, graphdef).lower(state, batch_of(shape, mesh)).compile()


def account(compiled, num_chips: int) -> dict[str, Any]:
  """What the compiler says that one chip needs and does in a step.

  Of Pallas calls it says what they say of themselves.
  """
  memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
  return dict(
    argument_bytes=memory.argument_size_in_bytes,
    temporary_bytes=memory.temp_size_in_bytes,
    peak_bytes=memory.peak_memory_in_bytes,
    flops=cost["flops"],
    hbm_bytes=cost["bytes accessed"],
    collectives=collectives.by_kind(collectives.find(text, num_chips)),
    num_loops=collectives.num_loops(text),
    num_kernels=text.count("tpu_custom_call"),
  )
