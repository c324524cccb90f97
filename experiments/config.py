"""Makes the tasks of configs, and checks configs against their defaults."""

from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from configs import default
from relpos_jax.config import at_least, check_types, check_values, flatten
from relpos_jax.errors import InputError
from relpos_jax.graphs.task import Graphs
from relpos_jax.music.task import MusicTask
from relpos_jax.training.sharding import mesh_sizes
from relpos_jax.training.task import Task
from relpos_jax.translation.task import Translation

_TASKS = dict(translation=Translation, music=MusicTask, graphs=Graphs)
_CHOICES = {
  "training.schedule": ("paper", "inverse_sqrt"),
  "training.prng": ("threefry2x32", "rbg", "unsafe_rbg"),
}
_NUMBERS = (
  ("from 0 to 2**32 - 1", lambda x: 0 <= x < 2**32, ("seed",)),
  at_least(1, "training.num_steps", "training.warmup_steps", "training.num_microbatches"),
  at_least(1, "training.eval_every", "training.save_every", "training.keep_checkpoints"),
  at_least(1, "training.max_skipped", "decoding.average_checkpoints"),
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
  check_types(config, defaults(config))
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
  if task not in default.TASKS:
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
