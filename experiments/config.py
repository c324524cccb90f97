"""Checks of configs: keys, choices and ranges of values by dotted key."""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from experiments.errors import InputError

# A description of the allowed numbers, a test for them, and the dotted keys they apply to.
Numbers = tuple[str, Callable[[float], bool], Collection[str]]

# The largest number of steps, in an int32, and the largest size of an axis.
MOST_STEPS, LARGEST = 2**31 - 1, 2**24
TEST_SETS = "data.pairs.test"  # the key of a test set, or of a group of them by name


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


def check_keys(names: Iterable[str], known: ConfigDict) -> None:
  """Raises InputError for a dotted key that is not known; suggests one like it.

  >>> check_keys(["seed", "model.widht"], ConfigDict(dict(seed=0, model=dict(width=512))))
  Traceback (most recent call last):
  ...
  experiments.errors.InputError: unknown config.model.widht: did you mean config.model.width?
  """
  keys = list(flatten(known))
  for name in names:
    if not any(f"{key}.".startswith(f"{name}.") for key in keys):
      similar = [key for key in keys if key.split(".")[-1] == name.split(".")[-1]]
      similar += difflib.get_close_matches(name, keys, n=1)
      hint = f"did you mean config.{similar[0]}?" if similar else "see configs/default.py"
      raise InputError(f"unknown config.{name}: {hint}")


def add_test_sets(config: ConfigDict, keys: Iterable[str]) -> None:
  """Adds the named test sets among dotted keys, as "data.pairs.test.long", to a config.

  A test set that the config has without a name gets the name "test".

  >>> config = ConfigDict(dict(data=dict(pairs=dict(test="a.tsv"))))
  >>> add_test_sets(config, ["seed", "data.pairs.test.long"])
  >>> config.data.pairs.test.to_dict()
  {'long': '', 'test': 'a.tsv'}
  """
  names = [name for group, _, name in (key.rpartition(".") for key in keys) if group == TEST_SETS]
  if names and (pairs := config.data.get("pairs")):
    old = dict(test=pairs.test) if isinstance(pairs.test, str) else pairs.test.to_dict()
    old = {name: files for name, files in old.items() if files}
    with config.unlocked():
      del pairs["test"]  # whose type would stay
      pairs.test = dict.fromkeys(names, "") | old


def flatten(config: Mapping[str, Any] | ConfigDict, prefix: str = "") -> dict[str, object]:
  """Returns every value by its dotted key; an empty group is a value {}."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, dict | ConfigDict):
      flat |= flatten(value, f"{prefix}{key}.") or {f"{prefix}{key}": {}}
    else:
      flat[prefix + key] = value
  return flat
