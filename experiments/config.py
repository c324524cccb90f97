"""Checks of configs: keys, choices and ranges of values by dotted key."""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from experiments.errors import InputError

# A description of the allowed numbers, a test for them, and the dotted keys they apply
# to.
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
  """Raises InputError for a value that is not among its choices or not in its range.

  Choices for keys that the config lacks are ignored.
  """
  values = flatten(config)
  for name, known in choices.items():
    if name in values and values[name] not in known:
      raise InputError(
        f"config.{name} is {values[name]!r}: choose one of {', '.join(known)}"
      )
  for wanted, fits, names in numbers:
    for name in names:
      if not fits(values[name]):
        raise InputError(f"config.{name} is {values[name]}: give a number {wanted}")


def check_keys(names: Iterable[str], known: ConfigDict) -> None:
  """Raises InputError for a dotted key that is not known; suggests one like it."""
  keys = list(flatten(known))
  for name in names:
    if not any(f"{key}.".startswith(f"{name}.") for key in keys):
      similar = [key for key in keys if key.split(".")[-1] == name.split(".")[-1]]
      similar += difflib.get_close_matches(name, keys, n=1)
      hint = (
        f"did you mean config.{similar[0]}?" if similar else "see configs/default.py"
      )
      raise InputError(f"unknown config.{name}: {hint}")


def check_form(values: Mapping[str, Any] | ConfigDict, known: ConfigDict) -> None:
  """Raises InputError for None, and for a value where the known config has a group."""
  keys = flatten(known)
  for name, value in flatten(values).items():
    is_group = keys.get(name, {}) == {}
    if value is None or (is_group and value != {}):
      wanted = "a group of values" if is_group else "a value"
      remedy = f"give {wanted}, as in configs/default.py"
      raise InputError(f"config.{name} is {value!r}: {remedy}")


def add_test_sets(config: ConfigDict, keys: Iterable[str]) -> None:
  """Adds the named test sets among dotted keys, as "data.pairs.test.long", to a config.

  A test set that the config has without a name gets the name "test".
  """
  names = [
    name
    for group, _, name in (key.rpartition(".") for key in keys)
    if group == TEST_SETS
  ]
  if names and (pairs := config.data.get("pairs")):
    old = dict(test=pairs.test) if isinstance(pairs.test, str) else pairs.test.to_dict()
    old = {name: files for name, files in old.items() if files}
    with config.unlocked():
      del pairs["test"]  # whose type would stay
      pairs.test = dict.fromkeys(names, "") | old


def flatten(
  config: Mapping[str, Any] | ConfigDict, prefix: str = ""
) -> dict[str, object]:
  """Returns every value by its dotted key; an empty group is a value {}."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, dict | ConfigDict):
      flat |= flatten(value, f"{prefix}{key}.") or {f"{prefix}{key}": {}}
    else:
      flat[prefix + key] = value
  return flat
