"""The values of a config by dotted key, held against those of another and against their meaning."""

import difflib
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from configs import default
from relpos_jax.errors import InputError

# What numbers are wanted, in words; whether one is such; and the dotted keys of those that must be.
Numbers = tuple[str, Callable[[float], bool], Collection[str]]


def defaults(config: Mapping[str, Any]) -> ConfigDict:
  """The values of `configs/default.py` for the task of a config; translation if it names none.

  Raises:
    InputError: there is no such task.
  """
  task = config.get("task", "translation")
  if task not in default.TASKS:
    raise InputError(f"config.task is {task!r}: choose one of {', '.join(default.TASKS)}")
  return default.get_config(task)


def without_retired(values: Mapping[str, Any]) -> ConfigDict:
  """Returns the config of an older run without the keys that are gone since.

  Raises:
    InputError: such a key has another value than the one that is left.

  >>> without_retired(dict(seed=1, data=dict(embedded=dict(seed=0))))["data"].to_dict()
  {'embedded': {}}
  """
  config = ConfigDict(values)
  for name, left in default.RETIRED.items():
    if not has_key(name, config):
      continue
    *groups, last = name.split(".")
    group = functools.reduce(operator.getitem, groups, config)
    if group[last] != left:
      raise InputError(
        f"config.{name} is {group[last]}, and only {left} is left: "
        "use the commit in the run's environment.json"
      )
    del group[last]
  return config


def at_least(least: int, *names: str) -> Numbers:
  """Finite numbers from `least` on."""
  return f"at least {least}", lambda x: least <= x < float("inf"), names


def rates(*names: str) -> Numbers:
  """Parts of a whole that are less than all of it."""
  return "from 0 to below 1", lambda x: 0 <= x < 1, names


def check_values(
  config: ConfigDict, choices: Mapping[str, Collection[Any]], numbers: Iterable[Numbers]
) -> None:
  """Holds values against their choices and their ranges.

  Raises:
    InputError: names the first key whose value is wrong, and those that are right.

  >>> config = ConfigDict(dict(model=dict(width=0)))
  >>> check_values(config, {}, [at_least(1, "model.width")])
  Traceback (most recent call last):
  ...
  relpos_jax.errors.InputError: config.model.width is 0: give a number at least 1
  """
  values = flatten(config)
  for name, known in choices.items():
    if values[name] not in known:
      raise InputError(f"config.{name} is {values[name]!r}: choose one of {', '.join(known)}")
  for wanted, fits, names in numbers:
    for name in names:
      if not fits(values[name]):
        raise InputError(f"config.{name} is {values[name]}: give a number {wanted}")


def check_types(config: ConfigDict, defaults: ConfigDict) -> None:
  """Holds the keys of `config` and the types of its values against those of `defaults`.

  An int may stand where a float belongs, but neither a bool where an int belongs nor an int where a
  tuple does. The entries of a tuple have the types of the default's entries; where the default is
  an empty tuple or None, anything goes.

  Raises:
    InputError: names the dotted key that is unknown, missing or of another type.

  >>> defaults = ConfigDict(dict(model=dict(width=512, rate=0.1)))
  >>> check_types(ConfigDict(dict(model=dict(width=128, rate=0))), defaults)
  >>> check_types(ConfigDict(dict(model=dict(width=True, rate=0.1))), defaults)
  Traceback (most recent call last):
  ...
  relpos_jax.errors.InputError: config.model.width must be of type int, not True (bool)
  """
  values, wanted = flatten(config), flatten(defaults)
  for name in values:
    if name not in wanted:
      raise unknown_key(name, defaults)
  for name, example in wanted.items():
    if name not in values:
      raise InputError(f"config.{name} is missing: start from the values of configs/default.py")
    if not _fits(values[name], example):
      value = values[name]
      raise InputError(
        f"config.{name} must be of type {_type_name(example)}, "
        f"not {value!r} ({type(value).__name__})"
      )


def has_key(name: str, config: ConfigDict) -> bool:
  """Whether `config` has the dotted key, of a value or of a group of them.

  >>> has_key("model.width", ConfigDict(dict(model=dict(width=512))))
  True
  """
  for part in name.split("."):
    if not isinstance(config, ConfigDict) or part not in config:
      return False
    config = config[part]
  return True


def unknown_key(name: str, config: ConfigDict) -> InputError:
  """The error for a key that `config` lacks, naming the likeliest key meant.

  >>> print(unknown_key("model.widht", ConfigDict(dict(model=dict(width=512)))))
  unknown config.model.widht: did you mean config.model.width?
  """
  names = list(flatten(config))
  close = difflib.get_close_matches(name, names, n=1)
  same_last_part = [known for known in names if known.split(".")[-1] == name.split(".")[-1]]
  for known in [*same_last_part, *close]:
    return InputError(f"unknown config.{name}: did you mean config.{known}?")
  return InputError(f"unknown config.{name}: configs/default.py explains every key there is")


def changes(config: ConfigDict, base: ConfigDict) -> dict[str, object]:
  """The values of `config` by dotted key that differ from those of `base`.

  >>> base = ConfigDict(dict(seed=0, model=dict(width=512, rate=0.1)))
  >>> changes(ConfigDict(dict(seed=0, model=dict(width=128, rate=0.1))), base)
  {'model.width': 128}
  """
  before = flatten(base)
  return {
    name: value
    for name, value in flatten(config).items()
    if name not in before or value != before[name]
  }


def own_values(config: ConfigDict) -> dict[str, object]:
  """The values that say what a run is: those changed, and its task if that is not translation.

  >>> config = default.get_config("graphs")
  >>> config.seed = 3
  >>> own_values(config)
  {'task': 'graphs', 'seed': 3}
  """
  task = {} if config.get("task", "translation") == "translation" else dict(task=config.task)
  return task | changes(config, defaults(config))


def flatten(config: ConfigDict, prefix: str = "") -> dict[str, object]:
  """Every value by its dotted key; a group without any is its own value."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, ConfigDict):
      flat |= flatten(value, f"{prefix}{key}.") or {f"{prefix}{key}": {}}
    else:
      flat[prefix + key] = value
  return flat


def _fits(value: object, default: object) -> bool:
  if default is None:
    return True
  if isinstance(default, tuple):
    fits_one = lambda entry: not default or any(_fits(entry, wanted) for wanted in default)
    return isinstance(value, tuple) and all(fits_one(entry) for entry in value)
  if type(default) is float:
    return type(value) in (int, float)
  return type(value) is type(default)


def _type_name(default: object) -> str:
  if not isinstance(default, tuple) or not default:
    return type(default).__name__
  return f"tuple of {' or '.join(dict.fromkeys(type(entry).__name__ for entry in default))}"
