"""Builds the steps of training and evaluation, and schedules the learning rate."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

from experiments.training import sharding
from experiments.training.loss import Loss
from relpos_jax.typing import Array, Int, PyTree


class TrainState(NamedTuple):
  """Holds the state that training steps change, and that checkpoints store."""

  step: Int[Array, ""]
  params: PyTree
  opt_state: PyTree


class Steps(NamedTuple):
  """Holds a model's structure, and the functions that train it."""

  graphdef: nnx.GraphDef
  shapes: TrainState  # shapes and shardings of the state
  init: Callable[[], TrainState]  # makes the state before the first step
  train: Callable[..., Any]  # see `make_train_step`
  evaluate: Callable[..., Any]  # see `make_eval_step`


def make_steps(
  make_model: Callable[[nnx.Rngs], nnx.Module],
  loss: Callable[..., Loss],
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
  mesh: sharding.AnyMesh,
  *,
  seed: int,
  num_microbatches: int,
  ring: bool,
) -> Steps:
  """Builds the steps of a model on a mesh, without computing or compiling.

  `loss(model, batch, rngs)` returns sums; it applies dropout if there are `rngs`.
  """
  graphdef, params = nnx.split(nnx.eval_shape(lambda: make_model(nnx.Rngs(0))))
  start = functools.partial(init_state, optimizer=optimizer)
  shapes = sharding.shard_shapes(mesh, jax.eval_shape(start, params))

  # No device ever holds all parameters, if the mesh shards them.
  @functools.partial(jax.jit, out_shardings=jax.tree.map(lambda x: x.sharding, shapes))
  def init_from(key):
    return start(nnx.state(make_model(nnx.Rngs(key))))

  def init() -> TrainState:
    return init_from(jax.random.key(seed))

  if ring:
    loss = sharding.use_ring(loss)
  train_step = make_train_step(
    graphdef,
    loss,
    optimizer,
    num_microbatches=num_microbatches,
    seed=seed,
    schedule=schedule,
  )
  return Steps(graphdef, shapes, init, train_step, make_eval_step(graphdef, loss))


def init_state(params: PyTree, optimizer: optax.GradientTransformation) -> TrainState:
  """Returns the state before the first step."""
  return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def make_train_step(
  graphdef: nnx.GraphDef,
  loss: Callable[..., Loss],
  optimizer: optax.GradientTransformation,
  *,
  num_microbatches: int = 1,
  seed: int = 0,
  schedule: optax.Schedule | None = None,
):
  """Builds the jitted `train_step(state, batch) -> (state, metrics)`.

  The step donates the state. `loss(model, batch, rngs)` returns sums. For any number of
  microbatches, the gradient is of the mean over all tokens of the batch. Dropout
  depends on the seed and the step alone.

  The metrics are loss (nats per token), grad_norm, num_tokens and skipped, and
  learning_rate if there is a `schedule`. If the loss or the gradient's norm is not
  finite, the step is skipped: `skipped` is 1, the step is counted, and parameters and
  optimizer state do not change.
  """

  def summed_loss(params, batch, key):
    return loss(nnx.merge(graphdef, params), batch, nnx.Rngs(dropout=key))

  def train_step(state: TrainState, batch):
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    gradient = jax.value_and_grad(summed_loss, has_aux=True)
    (total, num_tokens), grads = _sum_over_microbatches(
      gradient, state.params, batch, key, num_microbatches
    )
    scale = 1.0 / jnp.maximum(num_tokens, 1)
    grads = jax.tree.map(lambda g: g * scale, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = dict(
      loss=total * scale, grad_norm=optax.tree.norm(grads), num_tokens=num_tokens
    )
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    metrics["skipped"] = 1 - finite.astype(jnp.int32)
    if schedule:
      # The optimizer's count leaves out skipped steps. Some optimizers, such as SGD,
      # have no count.
      counts = optax.tree.get_all_with_path(state.opt_state, "count")
      count = counts[-1][1] if counts else state.step
      metrics["learning_rate"] = schedule(count)
    # Not optax.apply_if_finite: after many skipped steps, it applies an update anyway.
    new, old = (params, opt_state), (state.params, state.opt_state)
    state = TrainState(state.step + 1, *optax.tree.where(finite, new, old))
    return sharding.constrain_sharding(state), metrics

  return jax.jit(train_step, donate_argnums=0)


def make_eval_step(graphdef: nnx.GraphDef, loss: Callable[..., Loss]):
  """Builds the jitted `eval_step(params, batch) -> Loss`, without dropout.

  It is the loss of training, label smoothing included.
  """

  @jax.jit  # its name is shown while it compiles
  def eval_step(params, batch):
    return loss(nnx.merge(graphdef, params), batch)

  return eval_step


def _sum_over_microbatches(gradient, params, batch, key, num_microbatches: int):
  """Sums losses, tokens and gradients over microbatches, one after another.

  A microbatch takes every `num_microbatches`-th row, so that rows stay on their device.
  """
  if num_microbatches == 1:
    return gradient(params, batch, key)

  def split(x):
    num_rows = x.shape[0] // num_microbatches  # reshape(-1) fails if x is empty
    return jnp.moveaxis(x.reshape(num_rows, num_microbatches, *x.shape[1:]), 1, 0)

  parts = jax.tree.map(split, batch), jax.random.split(key, num_microbatches)
  shapes = jax.eval_shape(gradient, params, *jax.tree.map(lambda x: x[0], parts))
  zeros = jax.tree.map(jnp.zeros_like, shapes)

  def add(total, part):
    return (jax.tree.map(jnp.add, total, gradient(params, *part)), None)

  return jax.lax.scan(add, zeros, parts)[0]


def learning_rate(settings: ConfigDict, width: int) -> optax.Schedule:
  """Returns the schedule of `config.training`, for a model of a given width.

  The paper's schedule is rate * width**-0.5 * min(t**-0.5, t * warmup**-1.5), with
  updates t counted from 1 (Vaswani et al. 2017, section 5.3). It equals `inverse_sqrt`
  with a peak that depends on the model's width. Shaw et al. 2018 use warmup 4000 and
  rate 1; their code uses 8000 and 2 since October 2017.
  """
  peak, warmup = settings.learning_rate, settings.warmup_steps
  if settings.schedule == "paper":
    peak *= (width * warmup) ** -0.5
  return inverse_sqrt(peak, warmup)


def inverse_sqrt(peak: float, warmup: int) -> optax.Schedule:
  """Makes a schedule that rises linearly to `peak`, then falls as 1 / sqrt(t).

  rate(t) = peak * min(t / warmup, sqrt(warmup / t)). Updates t are counted from 1,
  while optax counts from 0. So the rate of the first update is not 0.
  """

  def rate(count):
    t = jnp.asarray(count, jnp.float32) + 1
    return peak * jnp.minimum(t / warmup, jnp.sqrt(warmup / t))

  return rate
