"""Converts `config.model` to the arguments of a model."""

import dataclasses
import importlib
import re
from typing import Any, Literal, get_args, get_origin

from ml_collections import ConfigDict

from experiments.errors import InputError
from relpos_jax.nn import Positions
from relpos_jax.nn.schemes import PositionsName


def model_values(model: ConfigDict, kind: type) -> dict[str, Any]:
  """Converts `config.model` to arguments of a model's config class.

  `kind` is the class, a dataclass. Raises InputError for a value that its annotations
  do not allow.
  """
  values = model.to_dict()
  width, num_heads = values["width"], values["num_heads"]
  if width % num_heads:
    raise ValueError(f"width is {width}; want a multiple of num_heads, {num_heads}")
  if values["implementation"] == "":
    values["implementation"] = None
  if values.get("left") == -1:  # models of graphs have no `left`
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
  """Imports the class that `module:Class` names; returns other names unchanged.

  Raises InputError if the name is neither a scheme nor a subclass of `Positions`.
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
  kind = getattr(module, class_name, None)
  if kind is None:
    raise InputError(
      f"{problem}: {module_name} has no {class_name}: give a class of it"
    )
  if not (isinstance(kind, type) and issubclass(kind, Positions)):
    base = "relpos_jax.nn.Positions"
    raise InputError(f"{problem}: it is no subclass of {base}: make it one")
  return kind
