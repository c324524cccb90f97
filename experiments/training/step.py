"""One step of training: its state, gradients and learning rates."""

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.training.sharding import constrain_sharding
from experiments.training.task import Loss
from relpos_jax.attention import choice
from relpos_jax.typing import Array, Int, PyTree


class TrainState(NamedTuple):
  """The state of training, and the content of a checkpoint."""

  step: Int[Array, ""]
  params: PyTree
  opt_state: PyTree


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
  """Builds the jitted `train_step(state, batch) -> (state, metrics)`, which donates the
  state.

  `loss(model, batch, rngs)` returns sums. The gradient is that of the mean over the
  batch's tokens, for any number of microbatches. Dropout depends on the seed and the
  step alone. Metrics: loss (nats per token), grad_norm, num_tokens, skipped, and
  learning_rate if the optimizer's `schedule` is given. If the loss or the norm is not
  finite, the step is skipped (1): its number is counted, and parameters and optimizer
  state do not change.
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
    if schedule:  # the optimizer counts no skipped steps
      *_, (_, count) = optax.tree.get_all_with_path(state.opt_state, "count")
      metrics["learning_rate"] = schedule(count)
    # optax.apply_if_finite would apply the update after too many skipped steps.
    new, old = (params, opt_state), (state.params, state.opt_state)
    state = TrainState(state.step + 1, *optax.tree.where(finite, new, old))
    return constrain_sharding(state), metrics

  return jax.jit(train_step, donate_argnums=0)


def make_eval_step(graphdef: nnx.GraphDef, loss: Callable[..., Loss]):
  """Builds `eval_step(params, batch) -> Loss`, the training loss without dropout."""

  @jax.jit  # its name is shown while it compiles
  def eval_step(params, batch):
    return loss(nnx.merge(graphdef, params), batch)

  return eval_step


@contextlib.contextmanager
def compiling_ahead() -> Iterator[Callable]:
  """Yields `start(work, *args)`, which runs its calls one after another in a background
  thread.

  It is meant for compiling programs before their first call: JAX keeps them, so that a
  call with arrays of the same shapes finds them. Processes of one run do not compile
  ahead.
  """
  on_mesh = dict(initializer=jax.set_mesh, initargs=(jax.sharding.get_mesh(),))
  threads = concurrent.futures.ThreadPoolExecutor(1, **on_mesh)
  try:
    yield threads.submit if jax.process_count() == 1 else lambda *_: None
  finally:
    threads.shutdown(wait=False, cancel_futures=True)


def naming_attention(
  step: Callable, start: Callable, state: TrainState, batches: Iterable[Any]
) -> Callable:
  """Returns a step that prints the attention that it runs.

  Compiles the step ahead for a `state` and `batches`, of which only the shapes count.
  One line has the implementations of the first batch, and another follows when a batch
  of another shape runs a new one.
  """
  printed, seen = set(), set()  # names of implementations; shapes of batches

  def prepare(state: TrainState, batch: Any) -> dict[str, str]:
    # The call below neither traces nor compiles again.
    with _reasons_for_attention() as reasons:
      traced = step.trace(state, batch)
    traced.lower().compile()
    return reasons

  started = {_shapes(batch): start(prepare, state, batch) for batch in batches}

  def named(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
    if (shapes := _shapes(batch)) not in seen:
      ahead = started.pop(shapes, None)
      reasons = ahead.result() if ahead else prepare(state, batch)
      new = [name for name in reasons if name not in printed]
      if new:
        chosen = "; ".join(f"{name}, because {reasons[name]}" for name in new)
        chosen = chosen.replace("implementation=", "config.model.implementation")
        print(f"attention, batches of {'x'.join(map(str, shapes[-1]))}: {chosen}")
        printed.update(new)
      seen.add(shapes)
    return step(state, batch)

  return named


class _ReasonsForAttention(logging.Handler):
  """Collects the implementations that one thread chooses as it traces."""

  def __init__(self):
    super().__init__()
    self.thread = threading.get_ident()
    self.reasons = {}  # by the name of the implementation

  def emit(self, record: logging.LogRecord) -> None:
    if record.thread == self.thread:
      implementation, reason = record.args
      self.reasons[implementation] = reason


@contextlib.contextmanager
def _reasons_for_attention() -> Iterator[dict[str, str]]:
  """Yields the reasons for implementations, by name, as this thread chooses them."""
  handler = _ReasonsForAttention()
  choice.logger.setLevel(logging.DEBUG)
  choice.logger.addHandler(handler)
  try:
    yield handler.reasons
  finally:
    choice.logger.removeHandler(handler)


def _shapes(batch: Any) -> tuple:
  return tuple(x.shape for x in jax.tree.leaves(batch))


def _sum_over_microbatches(gradient, params, batch, key, num_microbatches: int):
  """Computes losses, tokens and gradients of microbatches one after another, and sums
  them.

  A microbatch takes every `num_microbatches`-th row, so that rows stay on their device.
  """
  if num_microbatches == 1:
    return gradient(params, batch, key)

  def split(x):
    num_rows = x.shape[0] // num_microbatches  # -1 fails where x is empty
    return jnp.moveaxis(x.reshape(num_rows, num_microbatches, *x.shape[1:]), 1, 0)

  parts = jax.tree.map(split, batch), jax.random.split(key, num_microbatches)
  shapes = jax.eval_shape(gradient, params, *jax.tree.map(lambda x: x[0], parts))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  def add(total, part):
    return (jax.tree.map(jnp.add, total, gradient(params, *part)), None)

  return jax.lax.scan(add, zeros, parts)[0]


def inverse_sqrt(peak: float, warmup: int) -> optax.Schedule:
  """Rises linearly to `peak` at update number `warmup`, then falls as 1 / sqrt(update).

  rate(t) = peak * min(t / warmup, sqrt(warmup / t)), where t = count + 1: updates are
  numbered from 1, optax counts from 0. The first update thus moves the parameters.
  """

  def rate(count):
    t = jnp.asarray(count, jnp.float32) + 1
    return peak * jnp.minimum(t / warmup, jnp.sqrt(warmup / t))

  return rate
