"""Checks configs, builds the parts of a run from them, and loads a run from its directory."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx
from ml_collections import ConfigDict

from configs import default
from experiments.config import (
  LARGEST,
  MOST_STEPS,
  add_test_sets,
  between,
  check_form,
  check_keys,
  check_values,
  flatten,
)
from experiments.errors import InputError
from experiments.files import Path, in_bucket
from experiments.training import sharding
from experiments.training.averaging import average_last
from experiments.training.checkpoint import Checkpoints
from experiments.training.step import (
  TrainState,
  init_state,
  inverse_sqrt,
  make_eval_step,
  make_train_step,
)
from experiments.training.task import Run, Task
from experiments.training.workdir import check_unchanged, read_config

_CHOICES = {"training.schedule": ("paper", "inverse_sqrt")}
_NUMBERS = (
  ("from 0 to 2**32 - 1", lambda x: 0 <= x < 2**32, ("seed",)),
  between(0, MOST_STEPS, "training.num_steps", "training.num_epochs"),
  between(1, MOST_STEPS, "training.warmup_steps", "training.eval_every"),
  between(1, MOST_STEPS, "training.save_every", "training.max_skipped"),
  between(1, MOST_STEPS, "training.keep_checkpoints", "decoding.average_checkpoints"),
  between(1, LARGEST, "training.num_microbatches"),
  ("above 0", lambda x: 0 < x < float("inf"), ("training.learning_rate",)),
)


def parse_config(
  values: Mapping[str, Any] | ConfigDict,
  num_devices: int | None = None,
  given: Mapping[str, Any] | None = None,
  is_trained: bool = False,
) -> Task:
  """Returns the task of a config, checked in a second and without reading any data.

  Missing keys get their defaults, as in runs that are older than a key; `given`
  replaces values by dotted key. The mesh must fit `num_devices`, by default this
  machine's; 0 is for a config from another machine. `is_trained` skips tracing the
  model, which takes a third of a second.

  Raises InputError: names the first wrong value and the remedy.
  """
  config = defaults(values).copy_and_resolve_references()
  add_test_sets(config, flatten(values))
  check_keys(flatten(values), config)
  check_form(values, config)
  try:
    config.update(values)
    config.update_from_flattened_dict(given or {})
  except TypeError as error:
    raise InputError(f"config: {' '.join(str(error).split())}") from error
  check_values(config, _CHOICES, _NUMBERS)
  steps, epochs = config.training.num_steps, config.training.num_epochs
  if (steps > 0) == (epochs > 0):
    problem = (
      f"config.training.num_steps is {steps} and config.training.num_epochs {epochs}"
    )
    raise InputError(f"{problem}: give one of them, and 0 for the other")
  averaged, kept = config.decoding.average_checkpoints, config.training.keep_checkpoints
  if averaged > kept:
    problem = f"average_checkpoints is {averaged}, but only {kept} are kept"
    remedy = "raise config.training.keep_checkpoints"
    if is_trained:
      remedy = f"give --average_checkpoints={kept} or less"
    raise InputError(f"config.decoding.{problem}: {remedy}")
  if num_devices == 0:
    num_devices = math.prod(size for size in config.mesh.values() if size > 0)
  sizes = sharding.mesh_sizes(num_devices or jax.device_count(), **config.mesh)
  task = _task_class(config.task)(config)
  task.check(sizes)
  if not is_trained:
    task.check_model()
  for name in ("num_heads", "feed_forward"):
    if config.model[name] % sizes["tensor"]:
      value = f"config.model.{name}, {config.model[name]}"
      raise InputError(
        f"config.mesh.tensor is {sizes['tensor']}: give a divisor of {value}"
      )
  return task


def _task_class(name: str) -> type[Task]:
  """Imports one task: the libraries of the others take seconds to load."""
  if name == "translation":
    from experiments.translation.task import Translation as kind
  elif name == "music":
    from experiments.music.task import MusicTask as kind
  else:
    from experiments.graphs.task import Graphs as kind
  return kind


def defaults(config: Mapping[str, Any]) -> ConfigDict:
  """Returns the values of `configs/default.py` for the task of a config, by default translation."""
  task = config.get("task", "translation")
  if task not in tuple(default.TASKS):  # it may not be hashable
    raise InputError(
      f"config.task is {task!r}: choose one of {', '.join(default.TASKS)}"
    )
  return default.get_config(task).lock()


def changes(config: ConfigDict, base: ConfigDict) -> dict[str, object]:
  """Returns the values of `config`, by dotted key, that differ from those of `base`."""
  before, missing = flatten(base), object()
  return {key: x for key, x in flatten(config).items() if x != before.get(key, missing)}


def own_values(config: ConfigDict) -> dict[str, object]:
  """Returns the values that define a run: the changed ones, and its task unless translation."""
  task = (
    {} if config.get("task", "translation") == "translation" else dict(task=config.task)
  )
  return task | changes(config, defaults(config))


class Training(NamedTuple):
  """What trains a model: all that is built from a config, once."""

  run: Run  # with shapes in place of parameters
  shapes: TrainState  # of the state, with their shardings
  init: Callable[
    [], TrainState
  ]  # makes the state before the first step, from `config.seed`
  step: Callable[..., Any]  # see `make_train_step`
  eval_step: Callable[..., Any]  # see `make_eval_step`


def build(
  task: Task, vocabulary: Any, mesh: sharding.AnyMesh | None = None
) -> Training:
  """Builds model, optimizer and steps on a mesh, by default that of the config.

  The optimizer is Adam with the constants of Shaw et al. 2018. Nothing is computed or
  compiled.
  """
  config, mesh = task.config, mesh or sharding.make_mesh(**task.config.mesh)
  seed, rate = config.seed, schedule(config)
  graphdef, params = nnx.split(
    nnx.eval_shape(lambda: task.make_model(vocabulary, nnx.Rngs(0)))
  )
  run = Run(task, vocabulary, mesh, graphdef, sharding.shapes_on(mesh, params))
  optimizer = optax.adam(rate, b2=0.98, eps=1e-9)
  start = functools.partial(init_state, optimizer=optimizer)

  def init_params(key):
    return nnx.state(task.make_model(vocabulary, nnx.Rngs(key)))

  def init() -> TrainState:
    params = jax.jit(init_params)(jax.random.key(seed))
    return sharding.put_parameters(start(sharding.put_parameters(params, mesh)), mesh)

  loss = sharding.in_ring(task.loss) if config.mesh.ring else task.loss
  num = config.training.num_microbatches
  step = make_train_step(
    graphdef, loss, optimizer, num_microbatches=num, seed=seed, schedule=rate
  )
  shapes = sharding.shapes_on(mesh, jax.eval_shape(start, params))
  return Training(run, shapes, init, step, make_eval_step(graphdef, loss))


def schedule(config: ConfigDict) -> optax.Schedule:
  """Returns the learning rates of `config.training`, by the number of updates before.

  Those of the paper are rate * width**-0.5 * min(t**-0.5, t * warmup**-1.5), with
  updates t numbered from 1: `inverse_sqrt` with a peak that depends on the model's
  width. Vaswani et al. 2017, section 5.3; Shaw et al. 2018 have warmup 4000 and rate 1;
  the code from October 2017 on has 8000 and 2.
  """
  peak, warmup = config.training.learning_rate, config.training.warmup_steps
  if config.training.schedule == "paper":
    peak *= (config.model.width * warmup) ** -0.5
  return inverse_sqrt(peak, warmup)


def load_run(workdir: Path, name: str = "", average_checkpoints: int = 0) -> Run:
  """Loads a run on all devices, with its parameters averaged over the last checkpoints.

  At most `average_checkpoints` of them, 0: as in its config. Raises InputError if the
  tokenizer is not the one that the run was trained with.
  """
  task = load_task(workdir, name, average_checkpoints)
  check_unchanged(workdir)
  training = build(task, task.load_vocabulary(workdir), sharding.make_mesh())
  return with_average(training.run, workdir)


def load_task(workdir: Path, name: str = "", average_checkpoints: int = 0) -> Task:
  """Loads the task of the run in a folder, which may be of another machine.

  Raises InputError: the folder holds no run, or its config is damaged, or the run is
  not of the task that is named.
  """
  if not (workdir / "config.json").is_file():
    raise InputError(f"no training run in {str(workdir)!r}: give its --workdir")
  given = (
    {"decoding.average_checkpoints": average_checkpoints} if average_checkpoints else {}
  )
  values = read_config(workdir)
  decoding = values.get("decoding")
  if isinstance(decoding, dict) and "beam_size" in decoding:
    decoding.setdefault("stop", "bound")  # as before there was a choice
  task = parse_config(values, 0, given, is_trained=True)
  if name not in ("", task.config.task):
    raise InputError(
      f"--workdir={workdir} is a run of {task.config.task}: give a run of {name}"
    )
  return task


def with_average(run: Run, workdir: Path) -> Run:
  """Averages the parameters over the last checkpoints, replicated on every device.

  In a local folder the average is kept for the next command, in average.npz.
  """
  replicate = functools.partial(
    jax.ShapeDtypeStruct, sharding=sharding.replicated(run.mesh)
  )
  shapes = jax.tree.map(lambda x: replicate(x.shape, x.dtype), run.params)
  training, num = run.config.training, run.config.decoding.average_checkpoints
  keep = (
    None if in_bucket(workdir) or jax.process_count() > 1 else workdir / "average.npz"
  )
  with Checkpoints(workdir / "checkpoints") as checkpoints:
    params, steps = average_last(
      checkpoints, num, like=shapes, since=training.warmup_steps, keep=keep
    )
  return run._replace(params=params, steps=tuple(steps))
