"""Saves, loads and compares the names of a run's labels and classes."""

import json

from experiments.errors import InputError
from experiments.files import Path, write_whole
from experiments.graphs.graph import GraphData, GraphNames
from experiments.training.workdir import read_json

_NAMES_FILE = "graphs.json"


def check_run_names(data: GraphData, workdir: Path) -> None:
  """Raises InputError if a run was trained on other names of labels or classes."""
  if (workdir / _NAMES_FILE).exists():
    check_names(load_names(workdir), data)


def check_names(names: GraphNames, data: GraphData) -> None:
  """Raises InputError unless `data` have `names`, the names of the trained model."""
  for kind, ours, theirs in zip(GraphNames._fields, names, data.names, strict=True):
    if ours != theirs:
      remedy = "give the data it was trained on, or another --workdir"
      raise InputError(
        f"the data have {kind} {theirs}, the trained model {ours}: {remedy}"
      )


def load_names(workdir: Path) -> GraphNames:
  """Reads the names of labels and classes in a run directory."""
  values = read_json(workdir / _NAMES_FILE)
  for kind in ("node_labels", "edge_labels", "classes"):
    values[kind] = tuple(values[kind])
  return GraphNames(**values)


def save_names(names: GraphNames, workdir: Path) -> None:
  """Writes the names of labels and classes into a run directory."""
  write_whole(workdir / _NAMES_FILE, json.dumps(names._asdict(), indent=2) + "\n")
