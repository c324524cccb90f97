"""Compares configs with their defaults, and checks their values by dotted key."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from configs import default
from experiments.errors import InputError


def defaults(config: Mapping[str, Any]) -> ConfigDict:
  """Returns the default config for the task of `config`, by default translation."""
  task = config.get("task", "translation")
  tasks = list(default.TASKS)
  if task not in tasks:
    raise InputError(f"config.task is {task!r}: choose one of {', '.join(tasks)}")
  return default.get_config(task).lock()


def own_values(config: ConfigDict) -> dict[str, object]:
  """Returns the values that define a run: all that differ from the task's defaults.

  The task itself is among them only if it is not translation.
  """
  base = flatten(defaults(config)) | {"task": "translation"}
  own = {}
  for key, value in flatten(config).items():
    if key not in base or value != base[key]:
      own[key] = value
  return own


def check_values(config: ConfigDict) -> None:
  """Raises InputError for a value outside the limits in `configs/default.py`."""
  values = flatten(config)
  for key, limited in default.limits(config.task).items():
    value = values[key]
    if not limited.allows(value):
      shown = repr(value) if isinstance(value, str) else value
      raise InputError(f"config.{key} is {shown}: {limited.remedy}")


def check_keys(keys: Iterable[str], config: ConfigDict) -> None:
  """Raises InputError for an unknown dotted key; suggests a similar one."""
  known = list(flatten(config))
  for key in keys:
    if any(f"{other}.".startswith(f"{key}.") for other in known):
      continue
    name = key.split(".")[-1]
    similar = [other for other in known if other.split(".")[-1] == name]
    similar += difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean config.{similar[0]}?" if similar else "see configs/default.py"
    raise InputError(f"unknown config.{key}: {hint}")


def check_form(values: Mapping[str, Any]) -> None:
  """Raises InputError if a value is None, which a config would accept."""
  for key, value in values.items():
    if value is None:
      raise InputError(f"config.{key} is None: give a value, as in configs/default.py")


def flatten(
  config: Mapping[str, Any] | ConfigDict, prefix: str = ""
) -> dict[str, object]:
  """Flattens a config to values by dotted key; leaves out empty nested configs."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, dict | ConfigDict):
      flat |= flatten(value, f"{prefix}{key}.")
    else:
      flat[prefix + key] = value
  return flat
