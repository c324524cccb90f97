"""Checks configs, builds the parts of a run from them, and loads a run from its directory."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from configs import default
from experiments.config import LARGEST, MOST_STEPS, between, check_types, check_values, flatten
from experiments.data.tokenizer import tokenizer_files
from experiments.errors import InputError
from experiments.files import Path, to_path
from experiments.graphs.task import Graphs
from experiments.music.task import MusicTask
from experiments.training.checkpoint import Checkpoints
from experiments.training.sharding import (
  make_mesh,
  mesh_sizes,
  put_parameters,
  replicated,
  shapes_on,
)
from experiments.training.step import inverse_sqrt, make_train_step, paper_schedule
from experiments.training.task import Run, Task
from experiments.training.workdir import check_unchanged, read_json
from experiments.translation.task import Translation

_TASKS = dict(translation=Translation, music=MusicTask, graphs=Graphs)
_CHOICES = {
  "training.schedule": ("paper", "inverse_sqrt"),
  "training.prng": ("threefry2x32", "rbg", "unsafe_rbg"),
}
_NUMBERS = (
  ("from 0 to 2**32 - 1", lambda x: 0 <= x < 2**32, ("seed",)),
  between(1, MOST_STEPS, "training.num_steps", "training.warmup_steps", "training.eval_every"),
  between(1, MOST_STEPS, "training.save_every", "training.max_skipped"),
  between(1, MOST_STEPS, "training.keep_checkpoints", "decoding.average_checkpoints"),
  between(1, LARGEST, "training.num_microbatches"),
  ("above 0", lambda x: 0 < x < float("inf"), ("training.learning_rate",)),
)


def make_task(config: ConfigDict) -> Task:
  """Returns the task of a valid config."""
  return _TASKS[config.task](config)


def validate(config: ConfigDict, num_devices: int | None = None) -> None:
  """Checks the values of a config in a second, without reading any data.

  `num_devices` is for the mesh; by default that of this machine. Raises InputError, which names
  the first wrong value and the remedy.
  """
  known = defaults(config)
  check_types(config, known)
  for name in flatten(known).keys() - flatten(config).keys():
    raise InputError(f"config.{name} is missing: start from the values of configs/default.py")
  check_values(config, _CHOICES, _NUMBERS)
  averaged, kept = config.decoding.average_checkpoints, config.training.keep_checkpoints
  if averaged > kept:
    problem = f"but only {kept} are kept: raise config.training.keep_checkpoints"
    raise InputError(f"config.decoding.average_checkpoints is {averaged}, {problem}")
  sizes = mesh_sizes(num_devices or jax.device_count(), **config.mesh)
  make_task(config).check(sizes)
  for name in ("num_heads", "feed_forward"):
    if config.model[name] % sizes["tensor"]:
      value = f"config.model.{name}, {config.model[name]}"
      raise InputError(f"config.mesh.tensor is {sizes['tensor']}: give a divisor of {value}")


def defaults(config: Mapping[str, Any]) -> ConfigDict:
  """Returns the values of `configs/default.py` for the task of a config, by default translation."""
  task = config.get("task", "translation")
  if task not in [*default.TASKS]:  # which needs no hash
    raise InputError(f"config.task is {task!r}: choose one of {', '.join(default.TASKS)}")
  return default.get_config(task)


def changes(config: ConfigDict, base: ConfigDict) -> dict[str, object]:
  """Returns the values of `config`, by dotted key, that differ from those of `base`.

  >>> base = ConfigDict(dict(seed=0, model=dict(width=512, rate=0.1)))
  >>> changes(ConfigDict(dict(seed=0, model=dict(width=128, rate=0.1))), base)
  {'model.width': 128}
  """
  before, missing = flatten(base), object()
  return {key: x for key, x in flatten(config).items() if x != before.get(key, missing)}


def own_values(config: ConfigDict) -> dict[str, object]:
  """Returns the values that define a run: the changed ones, and its task unless translation.

  >>> config = default.get_config("graphs")
  >>> config.seed = 3
  >>> own_values(config)
  {'task': 'graphs', 'seed': 3}
  """
  task = {} if config.get("task", "translation") == "translation" else dict(task=config.task)
  return task | changes(config, defaults(config))


def plan_run(task: Task, vocabulary: Any) -> Run:
  """Returns a run on the devices of `config.mesh`, with shapes in place of parameters."""
  graphdef, shapes = plan_model(task, vocabulary)
  mesh = make_mesh(**task.config.mesh)
  return Run(task, vocabulary, mesh, graphdef, shapes_on(mesh, shapes))


def plan_model(task: Task, vocabulary: Any) -> tuple[nnx.GraphDef, nnx.State]:
  """Returns the model of a task, and its parameters' shapes."""
  return nnx.split(nnx.eval_shape(lambda: task.make_model(vocabulary, nnx.Rngs(0))))


def init_params(run: Run) -> nnx.State:
  """Initializes the parameters at random from `config.seed`."""

  def init_params(key):
    return nnx.state(run.task.make_model(run.vocabulary, nnx.Rngs(key)))

  return put_parameters(jax.jit(init_params)(jax.random.key(run.config.seed)), run.mesh)


def make_step(task: Task, graphdef: nnx.GraphDef):
  """Returns the jitted training step of a task."""
  config = task.config
  return make_train_step(
    graphdef,
    task.loss,
    make_optimizer(config),
    num_microbatches=config.training.num_microbatches,
    dropout_key=jax.random.key(config.seed, impl=config.training.prng),
    schedule=schedule(config),
  )


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
  """Returns Adam with the constants of Shaw et al. 2018 and the learning rates of a config."""
  return optax.adam(schedule(config), b2=0.98, eps=1e-9)


def schedule(config: ConfigDict) -> optax.Schedule:
  """Returns the learning rate schedule of `config.training`."""
  training = config.training
  if training.schedule == "paper":
    return paper_schedule(config.model.width, training.warmup_steps, training.learning_rate)
  return inverse_sqrt(training.learning_rate, training.warmup_steps)


def load_run(workdir: str | Path, name: str = "", average_checkpoints: int = 0) -> Run:
  """Loads a run on all devices, with its parameters averaged over the last checkpoints.

  At most `average_checkpoints` of them, 0: as in its config. Raises InputError if the tokenizer is
  not the one that the run was trained with.
  """
  task = load_task(workdir, name, average_checkpoints)
  check_unchanged(to_path(workdir), tokenizer_digest(to_path(workdir)))
  return with_average(plan_run(task, task.load_vocabulary(to_path(workdir))), workdir)


def tokenizer_digest(workdir: Path) -> dict[str, str]:
  """Returns the digest of the tokenizers in a run directory, by name; nothing if it has none."""
  contents = [np.frombuffer(file.read_bytes(), np.uint8) for file in tokenizer_files(workdir)]
  return dict(tokenizer=digest_of(contents)) if contents else {}


def digest_of(items: Iterable[np.ndarray | str]) -> str:
  """Returns the SHA-256 of arrays, with their dtypes and shapes, and of texts, with their sizes."""
  found = hashlib.sha256()
  for item in items:
    array = np.frombuffer(item.encode(), np.uint8) if isinstance(item, str) else item
    found.update(f"{array.dtype}{array.shape}".encode())
    found.update(np.ascontiguousarray(array))
  return found.hexdigest()


def load_task(workdir: str | Path, name: str = "", average_checkpoints: int = 0) -> Task:
  """Loads the task of the run in a folder, on all devices; if named, it must be that task."""
  config = read_config(workdir)
  config.mesh = defaults(config).mesh
  if average_checkpoints:
    config.decoding.average_checkpoints = average_checkpoints
  validate(config, num_devices=1)  # the run's batches may suit another number of devices
  if name not in ("", config.task):
    raise InputError(f"--workdir={workdir} is a run of {config.task}: give a run of {name}")
  return make_task(config)


def read_config(workdir: str | Path) -> ConfigDict:
  """Reads the config of the run in a folder, with defaults for keys added since.

  Raises:
    InputError: the folder holds no run, or its config is damaged.
  """
  path = to_path(workdir) / "config.json"
  if not path.is_file():
    raise InputError(f"no training run in {str(path.parent)!r}: give its --workdir")
  values = read_json(path)
  check_types(values, config := defaults(values))
  with config.ignore_type():
    config.update(values)
  return config


def with_average(run: Run, workdir: str | Path) -> Run:
  """Averages the parameters over the last checkpoints, replicated on every device."""
  sharding = replicated(run.mesh)
  like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  num = run.config.decoding.average_checkpoints
  training, shapes = run.config.training, jax.tree.map(like, run.params)
  folder = to_path(workdir) / "checkpoints"
  with Checkpoints(folder, save_every=training.save_every) as checkpoints:
    params, steps = checkpoints.average(num, like=shapes, since=training.warmup_steps)
  return run._replace(params=params, steps=tuple(steps))
