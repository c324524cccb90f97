"""The graphs that a config names, in splits, and the names of what they are made of."""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from relpos_jax.errors import InputError
from relpos_jax.graphs.graph import GraphData, GraphNames, stratified_folds
from relpos_jax.training.workdir import read_json, write_whole

_FOLDS_SEED = 0  # of every run: what one tests on, no other fold's run does
_FILE = "graphs.json"


def load(config: ConfigDict) -> GraphData:
  """The graphs of `config.data`: splits train and valid, and all others to test on.

  Raises:
    InputError: whatever is wrong with them, or fewer graphs than folds.
  """
  data = config.data
  if data.source == "clutrr":
    from relpos_jax.graphs import clutrr

    return clutrr.load(**data.clutrr)
  from relpos_jax.graphs import tu

  fold = fold_of(config.seed, data.tu.fold, data.tu.num_folds)
  return _folded(tu.load(data.tu.name, data.tu.path), fold, data.tu.num_folds)


def fold_of(seed: int, fixed: int, number: int) -> int:
  """The fold that a run tests on: the fixed one, or where that is -1 its seed's.

  >>> fold_of(12, -1, 10), fold_of(12, 3, 10)
  (2, 3)
  """
  return seed % number if fixed == -1 else fixed


def _folded(data: GraphData, fold: int, number: int) -> GraphData:
  """One fold to test on, the next to validate, all others to train."""
  graphs = data.splits["all"]
  if len(graphs) < 3:
    raise InputError(f"{len(graphs)} graphs in config.data.tu: at least 3 are needed")
  if len(graphs) < number:
    raise InputError(
      f"config.data.tu.num_folds is {number}, of {len(graphs)} graphs: give 3 to {len(graphs)}"
    )
  folds = stratified_folds([int(graph.target) for graph in graphs], number, _FOLDS_SEED)
  parts = dict(test=folds.pop(fold), valid=folds.pop(fold % len(folds)))
  parts["train"] = np.concatenate(folds)
  splits = {name: [graphs[i] for i in parts[name]] for name in ("train", "valid", "test")}
  note = f"fold {fold} of {number} is tested on, fold {(fold + 1) % number} validates"
  return dataclasses.replace(data, splits=splits, notes=(*data.notes, note))


def learn_names(data: GraphData, workdir: pathlib.Path) -> GraphNames:
  """The data's, which must be those of the run's folder, if it has any."""
  return known(read_names(workdir), data) if (workdir / _FILE).exists() else data.names


def read_names(workdir: pathlib.Path) -> GraphNames:
  """What `write_names` wrote; InputError if it is missing or damaged."""
  path = workdir / _FILE
  if not path.exists():
    raise InputError(f"no {path}: the run was stopped before its first step; train it again")
  values = read_json(path)
  if {*values} != {*GraphNames._fields}:
    raise InputError(f"damaged {path}: train into another folder")
  return GraphNames(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def write_names(names: GraphNames, workdir: pathlib.Path) -> None:
  """Writes graphs.json into the run's folder, if it is not there."""
  path = workdir / _FILE
  if not path.exists():
    write_whole(path, json.dumps(names._asdict(), indent=2) + "\n")


def known(names: GraphNames, data: GraphData) -> GraphNames:
  """The names that the model knows; InputError if the data have others."""
  for kind in GraphNames._fields:
    ours, theirs = getattr(names, kind), getattr(data.names, kind)
    if ours != theirs:
      raise InputError(
        f"the data have {kind} {_short(theirs)}, the trained model {_short(ours)}: "
        "give the data it was trained on, or another --workdir"
      )
  return names


def _short(value: Any) -> str:
  text = ", ".join(value) if isinstance(value, tuple) else str(value)
  return text if len(text) < 60 else f"{text[:60]}..."
