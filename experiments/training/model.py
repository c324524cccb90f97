"""Makes models of `config.model`."""

import dataclasses
import importlib
import re
from typing import Any, Literal, get_args, get_origin

from ml_collections import ConfigDict

from experiments.errors import InputError
from relpos_jax.nn import Positions
from relpos_jax.nn.schemes import PositionsName


def model_values(config: ConfigDict, kind: type) -> dict[str, Any]:
  """Returns the values of `config.model` as arguments of a model's config.

  Raises InputError for a value that is not a choice of `kind`, a dataclass.
  """
  values = config.model.to_dict()
  width, num_heads = values["width"], values["num_heads"]
  if width % num_heads:
    raise ValueError(f"width is {width}; want a multiple of num_heads, {num_heads}")
  if values["implementation"] == "":
    values["implementation"] = None
  if values.get("left") == -1:  # graphs have none
    values["left"] = None
  if "positions" in values:
    values["positions"] = load_positions(values["positions"])
  for field in dataclasses.fields(kind):
    choices = get_args(field.type) if get_origin(field.type) is Literal else ()
    if choices and values.get(field.name, choices[0]) not in choices:
      problem = f"config.model.{field.name} is {values[field.name]!r}"
      raise InputError(f"{problem}: choose one of {', '.join(choices)}")
  return values


def load_positions(name: str) -> str | type[Positions]:
  """Returns the class that `module:Class` names, or the name of a scheme as it is.

  Raises InputError: it is neither, or there is no such class.
  """
  if name in get_args(PositionsName):
    return name
  problem = f"config.model.positions is {name!r}"
  if not re.fullmatch(r"\w+(\.\w+)*:\w+", name):
    known = ", ".join(get_args(PositionsName))
    raise InputError(f"{problem}: choose one of {known}, or give your own module:Class")
  module_name, _, class_name = name.partition(":")
  try:
    module = importlib.import_module(module_name)
  except ImportError as error:
    remedy = "start the command in the module's folder, or add that to PYTHONPATH"
    raise InputError(f"{problem}: {error}: {remedy}") from error
  if not hasattr(module, class_name):
    absent = f"{module_name} has no {class_name}"
    raise InputError(f"{problem}: {absent}: give one of its classes")
  kind = getattr(module, class_name)
  if not (isinstance(kind, type) and issubclass(kind, Positions)):
    base = "relpos_jax.nn.Positions"
    raise InputError(f"{problem}: {class_name} is no subclass of {base}: make it one")
  return kind
