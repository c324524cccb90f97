"""Checks of configs: keys, choices and ranges of values by dotted key."""

import difflib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from experiments.errors import InputError

# A description of the allowed numbers, a test for them, and the dotted keys they apply to.
Numbers = tuple[str, Callable[[float], bool], Collection[str]]

# The largest number of steps, in an int32, and the largest size of an axis.
MOST_STEPS, LARGEST = 2**31 - 1, 2**24
_TYPES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def between(least: int, most: int, *names: str) -> Numbers:
  """Allows numbers from `least` to `most`."""
  return f"from {least} to {most:,}", lambda x: least <= x <= most, names


def rates(*names: str) -> Numbers:
  """Allows numbers from 0 to below 1."""
  return "from 0 to below 1", lambda x: 0 <= x < 1, names


def check_values(
  config: ConfigDict, choices: Mapping[str, Collection[Any]], numbers: Iterable[Numbers]
) -> None:
  """Checks values against their choices, if the config has them, and their ranges.

  Raises InputError for a wrong value; the message names its key and the allowed values.

  >>> config = ConfigDict(dict(model=dict(width=0)))
  >>> check_values(config, {}, [between(1, 64, "model.width")])
  Traceback (most recent call last):
  ...
  experiments.errors.InputError: config.model.width is 0: give a number from 1 to 64
  """
  values = flatten(config)
  for name, known in choices.items():
    if name in values and values[name] not in known:
      raise InputError(f"config.{name} is {values[name]!r}: choose one of {', '.join(known)}")
  for wanted, fits, names in numbers:
    for name in names:
      if not fits(values[name]):
        raise InputError(f"config.{name} is {values[name]}: give a number {wanted}")


def check_types(values: Mapping[str, Any] | ConfigDict, known: ConfigDict) -> None:
  """Raises InputError for a key or a group that is not known, or a value of another type.

  >>> check_types(dict(model=dict(width=True)), ConfigDict(dict(model=dict(width=512))))
  Traceback (most recent call last):
  ...
  experiments.errors.InputError: config.model.width is true: give an integer
  """
  types = {name: type(value) for name, value in flatten(known).items()}
  for name, value in flatten(values).items():
    wanted = types.get(name, dict)
    if name not in types and not any(key.startswith(f"{name}.") for key in types):
      raise unknown_key(name, known)
    fits = isinstance(value, (int, float) if wanted is float else wanted)
    if not fits or (isinstance(value, bool) and wanted is not bool):  # a bool is an int
      problem = f"config.{name} is {json.dumps(value, default=str)}"
      raise InputError(f"{problem}: give {_TYPES.get(wanted, 'its keys')}")


def unknown_key(name: str, config: ConfigDict) -> InputError:
  """Returns the error for an unknown key; it suggests one with the same last part, or like it.

  >>> config = ConfigDict(dict(seed=0, model=dict(width=512)))
  >>> print(unknown_key("model.widht", config))
  unknown config.model.widht: did you mean config.model.width?
  >>> print(unknown_key("data.width", config))
  unknown config.data.width: did you mean config.model.width?
  """
  names = list(flatten(config))
  similar = [known for known in names if known.split(".")[-1] == name.split(".")[-1]]
  similar += difflib.get_close_matches(name, names, n=1)
  hint = f"did you mean config.{similar[0]}?" if similar else "see configs/default.py"
  return InputError(f"unknown config.{name}: {hint}")


def flatten(config: Mapping[str, Any] | ConfigDict, prefix: str = "") -> dict[str, object]:
  """Returns every value by its dotted key; an empty group is a value {}."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, dict | ConfigDict):
      flat |= flatten(value, f"{prefix}{key}.") or {f"{prefix}{key}": {}}
    else:
      flat[prefix + key] = value
  return flat
