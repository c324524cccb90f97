"""Checks of configs: keys, choices and ranges of values by dotted key."""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from relpos_jax.errors import InputError

# A description of the allowed numbers, a test for them, and the dotted keys they apply to.
Numbers = tuple[str, Callable[[float], bool], Collection[str]]


def at_least(least: int, *names: str) -> Numbers:
  """Allows finite numbers from `least` on."""
  return f"at least {least}", lambda x: least <= x < float("inf"), names


def rates(*names: str) -> Numbers:
  """Allows numbers from 0 to below 1."""
  return "from 0 to below 1", lambda x: 0 <= x < 1, names


def check_values(
  config: ConfigDict, choices: Mapping[str, Collection[Any]], numbers: Iterable[Numbers]
) -> None:
  """Checks values against their choices, if the config has them, and their ranges.

  Raises InputError for a wrong value; the message names its key and the allowed values.

  >>> config = ConfigDict(dict(model=dict(width=0)))
  >>> check_values(config, {}, [at_least(1, "model.width")])
  Traceback (most recent call last):
  ...
  relpos_jax.errors.InputError: config.model.width is 0: give a number at least 1
  """
  values = flatten(config)
  for name, known in choices.items():
    if name in values and values[name] not in known:
      raise InputError(f"config.{name} is {values[name]!r}: choose one of {', '.join(known)}")
  for wanted, fits, names in numbers:
    for name in names:
      if not fits(values[name]):
        raise InputError(f"config.{name} is {values[name]}: give a number {wanted}")


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
