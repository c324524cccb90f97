"""Holds a model with its config, and loads its averaged parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from experiments.files import Path, in_bucket
from experiments.training import sharding
from experiments.training.averaging import average_last
from experiments.training.checkpoint import Checkpoints
from experiments.training.step import Steps
from relpos_jax.typing import PyTree


class Run(NamedTuple):
  """Holds the config, vocabulary, mesh and model of a run, before or after training."""

  config: ConfigDict
  vocabulary: Any
  mesh: jax.sharding.Mesh
  graphdef: nnx.GraphDef
  params: nnx.State  # arrays, or only their shapes
  averaged: tuple[int, ...] = ()  # the steps of the checkpoints that were averaged


def load_trained(
  config: ConfigDict, vocabulary: Any, build: Callable[..., Steps], workdir: Path
) -> Run:
  """Loads the trained model of a run directory; replicates it on all devices.

  `build(config, vocabulary, mesh)` is the function in the train.py of the config's
  task.
  """
  mesh = sharding.make_mesh()
  steps = build(config, vocabulary, mesh)
  run = Run(config, vocabulary, mesh, steps.graphdef, steps.shapes.params)
  return load_average(run, workdir)


def load_average(run: Run, workdir: Path) -> Run:
  """Loads the average over the last checkpoints, replicated on every device.

  If the run directory is local, the average is cached in average.npz for the next
  command.
  """
  config = run.config
  place = sharding.replicated(run.mesh)
  shapes = jax.tree.map(lambda x: x.update(sharding=place), run.params)
  file = workdir / "average.npz"
  if in_bucket(workdir) or jax.process_count() > 1:
    file = None
  with Checkpoints(workdir / "checkpoints") as checkpoints:
    params, averaged = average_last(
      checkpoints,
      config.decoding.average_checkpoints,
      like=shapes,
      since=config.training.warmup_steps,
      keep=file,
    )
  return run._replace(params=params, averaged=tuple(averaged))


def copy_to_process(params: PyTree) -> PyTree:
  """Copies replicated arrays to this process, so that it can compute by itself."""
  return jax.tree.map(jnp.asarray, jax.device_get(params))
