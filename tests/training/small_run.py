"""A training so small that its processes cost little more than their start.

  python tests/training/small_run.py FOLDER NUM_STEPS PROCESS SIGNAL STEP

Prints its losses as JSON. A process sends itself a signal when it reports a step.
"""

import itertools
import json
import os
import pathlib
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.training.checkpoint import Checkpoints
from experiments.training.loop import take_steps
from experiments.training.processes import StopOnSignal, check_same, join_processes
from experiments.training.sharding import make_mesh, parameter_sharding, put_batch
from experiments.training.step import TrainState


class Rows(NamedTuple):
  target: jax.Array


def batch(step: int) -> Rows:
  return Rows(np.random.default_rng(step).normal(size=(8, 4)).astype(np.float32))


def loss(weights: jax.Array, batch: Rows) -> jax.Array:
  return jnp.mean((jnp.tanh(batch.target) @ weights.T - 1) ** 2)


@jax.jit
def train_step(state: TrainState, batch: Rows):
  value, gradient = jax.value_and_grad(loss)(state.params, batch)
  metrics = dict(loss=value, grad_norm=jnp.float32(1))
  metrics |= dict(num_tokens=jnp.int32(8), skipped=0)
  return TrainState(state.step + 1, state.params - 0.1 * gradient, ()), metrics


def run(folder: pathlib.Path, num_steps: int, num_devices=-1, at=None, stop=None):
  """Trains from the last checkpoint, if any; returns losses by step.

  Calls `at` with each step that is reported.
  """
  mesh = make_mesh(num_devices)
  losses = {}

  def report(step, metrics):
    losses[step] = metrics["loss"]
    if at:
      at(step)

  with (
    stop or StopOnSignal() as stop,
    Checkpoints(folder, rename_damaged=True) as checkpoints,
  ):
    state = TrainState(jnp.int32(0), (), ())
    state = jax.device_put(state, parameter_sharding(state, mesh))
    state = state._replace(params=put_batch(np.ones((8, 4), np.float32), mesh))
    state = checkpoints.restore(like=state) or state
    check_same(dict(num_steps=num_steps))
    stop.deferred = True
    steps = itertools.count(int(state.step))
    take_steps(
      state,
      train_step,
      (put_batch(batch(step), mesh) for step in steps),
      num_steps=num_steps,
      report=report,
      evaluate=lambda state: None,
      save=lambda state: checkpoints.save(int(state.step), state),
      should_stop=stop.should_stop,
      eval_every=1000,
      save_every=10,
    )
  return losses


def main(folder: str, num_steps: str, process="0", signal="0", step="0") -> None:
  join_processes()

  def at(now):
    if (jax.process_index(), now) == (int(process), int(step)):
      os.kill(os.getpid(), int(signal))
      time.sleep(5)  # JAX looks for a signal each second

  stop = StopOnSignal()
  losses = run(pathlib.Path(folder), int(num_steps), at=at, stop=stop)
  received = stop.signal.name if stop.stopping else None
  print(json.dumps(dict(process=jax.process_index(), losses=losses, signal=received)))


if __name__ == "__main__":
  main(*sys.argv[1:])
