"""The training step of a config, compiled for given chips, and its compiler's account of it."""

from typing import Any

import jax
from ml_collections import ConfigDict

from experiments.planning import collectives
from experiments.run import make_optimizer, make_step, plan_model
from experiments.tasks import make_task
from relpos_jax.training.sharding import AnyMesh, of_batches, shapes_on
from relpos_jax.training.step import TrainState, init_state

Shape = tuple[int, ...]  # rows, tokens; of graphs more


def first_state(config: ConfigDict, mesh: AnyMesh) -> tuple[Any, TrainState]:
  """The model and, as shapes on a mesh, the state before the first step of its training."""
  task = make_task(config)
  graphdef, params = plan_model(task, task.mock_vocabulary())
  start = lambda params: init_state(params, make_optimizer(config))
  return graphdef, shapes_on(mesh, jax.eval_shape(start, params))


def batch_of(config: ConfigDict, shape: Shape, mesh: AnyMesh) -> Any:
  """A batch of [rows, tokens] as shapes, as training puts it on a mesh."""
  place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of_batches(mesh, x.ndim))
  return jax.tree.map(place, make_task(config).empty_batch(shape))


def compile_step(config: ConfigDict, mesh: jax.sharding.Mesh, shape: Shape):
  """The training step for batches of [rows, tokens], compiled for the devices of a mesh.

  They need not be there. It is what they would run: the mesh is in context, so that attention is
  chosen for its platform.
  """
  graphdef, state = first_state(config, mesh)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    return (
      make_step(make_task(config), graphdef).lower(state, batch_of(config, shape, mesh)).compile()
    )


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
