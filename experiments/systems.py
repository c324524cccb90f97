"""Finds the train.py of a task, and checks and loads configs.

A system is a folder that is named after its task, with a train.py. Its functions
`train` and `evaluate` say what happens, in order. Commands for all tasks also call its
`check`, `build`, `make_model`, `loss`, `mock_vocabulary` and `empty_batch`. Copy a
folder to make a system of your own; docs/development.md says what else it needs.
"""

import functools
import importlib
import json
import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
from flax import nnx
from ml_collections import ConfigDict

from experiments.config import check_form, check_keys, check_values, defaults, flatten
from experiments.errors import InputError
from experiments.files import Path
from experiments.training.batches import check_batches
from experiments.training.sharding import AXES, mesh_sizes
from experiments.training.workdir import read_config


def find_system(task: str) -> ModuleType:
  """Imports the train.py of a task.

  Other systems are not imported, because that takes seconds.
  """
  return importlib.import_module(f"experiments.{task}.train")


def parse_config(
  values: Mapping[str, Any] | ConfigDict,
  num_devices: int | None = None,
  changes: Mapping[str, Any] | None = None,
  is_trained: bool = False,
) -> ConfigDict:
  """Completes and checks a config, in a second and without reading any data.

  Missing keys get their defaults, because older runs lack newer keys. Tracing the
  model, which takes a third of a second, is left out if `is_trained`.

  Args:
    num_devices: the mesh must fit this many devices, by default this machine's. With 0
      it may need any number of devices: use this if the config is for another machine.
    changes: replaces values, by dotted key.

  Raises InputError, which names the first wrong value and the remedy.
  """
  config = defaults(values).copy_and_resolve_references()
  values = flatten(values) | (changes or {})
  check_keys(values, config)
  check_form(values)
  try:
    config.update_from_flattened_dict(values)
  except TypeError as error:
    raise InputError(f"config: {' '.join(str(error).split())}") from error
  check_values(config)
  _check_steps(config.training.num_steps, config.training.num_epochs)
  num_averaged = config.decoding.average_checkpoints
  _check_average(num_averaged, config.training.keep_checkpoints, is_trained)
  if num_devices == 0:
    num_devices = math.prod(max(1, config.mesh[axis]) for axis in AXES)
  sizes = mesh_sizes(num_devices or jax.device_count(), **config.mesh)
  check_batches(config, sizes)
  find_system(config.task).check(config)
  if not is_trained:
    check_model(config)
  _check_tensor_axis(config.model, sizes["tensor"])
  return config


def _check_steps(steps: int, epochs: int) -> None:
  if (steps > 0) == (epochs > 0):
    raise InputError(
      f"config.training.num_steps is {steps} and config.training.num_epochs {epochs}: "
      "give one of them, and 0 for the other"
    )


def _check_average(num_averaged: int, num_saved: int, is_trained: bool) -> None:
  if num_averaged <= num_saved:
    return
  remedy = "raise config.training.keep_checkpoints"
  if is_trained:
    remedy = f"give --average_checkpoints={num_saved} or less"
  raise InputError(
    f"config.decoding.average_checkpoints is {num_averaged}, but only {num_saved} "
    f"are kept: {remedy}"
  )


def _check_tensor_axis(model: ConfigDict, size: int) -> None:
  for name in ("num_heads", "feed_forward"):
    if model[name] % size:
      raise InputError(
        f"config.mesh.tensor is {size}: give a divisor of config.model.{name}, "
        f"{model[name]}"
      )


def check_is_of_tokens(config: ConfigDict) -> None:
  """Raises InputError unless a config's batches are of tokens, [rows, length]."""
  if config.task not in ("translation", "music"):
    raise InputError(f"--config is of {config.task}: give one of translation or music")


def check_model(config: ConfigDict) -> None:
  """Raises InputError if the model does not support its config.

  Traces the training loss of a model with one layer; nothing is computed.
  """
  config = config.copy_and_resolve_references()
  config.model.num_layers = 1
  config.update(name="", seed=0)  # so that the runs of a sweep share one trace
  try:
    _trace_loss(config.to_json(sort_keys=True))
  except InputError:
    raise
  except (ValueError, NotImplementedError) as error:
    raise InputError(f"config.model: {' '.join(str(error).split())}") from error


@functools.cache
def _trace_loss(text: str) -> None:
  config = ConfigDict(json.loads(text))
  system = find_system(config.task)
  vocabulary = system.mock_vocabulary(config)

  def loss(batch):
    model = system.make_model(config, vocabulary, nnx.Rngs(0))
    return system.loss(model, batch, nnx.Rngs(dropout=0))

  jax.eval_shape(loss, system.empty_batch((1, config.batches.max_length)))


def load_config(
  workdir: Path, task: str = "", average_checkpoints: int = 0
) -> ConfigDict:
  """Loads the config of a run directory; the run may be from another machine.

  `average_checkpoints` replaces the config's value, unless it is 0. Raises InputError
  if the folder holds no run, if its config is damaged, or if the run is of another
  task.
  """
  if not (workdir / "config.json").is_file():
    raise InputError(f"no training run in {str(workdir)!r}: give its --workdir")
  changes = {}
  if average_checkpoints:
    changes["decoding.average_checkpoints"] = average_checkpoints
  config = parse_config(read_config(workdir), 0, changes, is_trained=True)
  if task not in ("", config.task):
    raise InputError(
      f"--workdir={workdir} is a run of {config.task}: give a run of {task}"
    )
  return config
