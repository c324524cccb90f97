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


def changes(config: ConfigDict, base: ConfigDict) -> dict[str, object]:
  """Returns the values of `config` that differ from `base`, by dotted key."""
  values_before = flatten(base)
  changed = {}
  for key, value in flatten(config).items():
    if key not in values_before or value != values_before[key]:
      changed[key] = value
  return changed


def own_values(config: ConfigDict) -> dict[str, object]:
  """Returns the values that define a run: all that differ from the task's defaults.

  The task itself is among them only if it is not translation.
  """
  values = changes(config, defaults(config))
  if config.get("task", "translation") == "translation":
    return values
  return {"task": config.task} | values


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


def check_form(values: Mapping[str, Any] | ConfigDict, config: ConfigDict) -> None:
  """Raises InputError if a value is None, or stands in place of a nested config."""
  known = flatten(config)
  for key, value in flatten(values).items():
    is_group = known.get(key, {}) == {}
    if value is None or (is_group and value != {}):
      wanted = "a group of values" if is_group else "a value"
      remedy = f"give {wanted}, as in configs/default.py"
      raise InputError(f"config.{key} is {value!r}: {remedy}")


def flatten(
  config: Mapping[str, Any] | ConfigDict, prefix: str = ""
) -> dict[str, object]:
  """Flattens a config to values by dotted key; an empty nested config becomes {}."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, dict | ConfigDict):
      flat |= flatten(value, f"{prefix}{key}.") or {f"{prefix}{key}": {}}
    else:
      flat[prefix + key] = value
  return flat
