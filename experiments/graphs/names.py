"""Saves and loads the names of a run's labels and classes."""

import json

from experiments.files import Path, write_whole
from experiments.graphs.graph import GraphNames
from experiments.training.workdir import read_json

_NAMES_FILE = "graphs.json"


def load_names(workdir: Path) -> GraphNames:
  """Reads the names of labels and classes in a run directory."""
  values = read_json(workdir / _NAMES_FILE)
  for kind in ("node_labels", "edge_labels", "classes"):
    values[kind] = tuple(values[kind])
  return GraphNames(**values)


def save_names(names: GraphNames, workdir: Path) -> None:
  """Writes the names of labels and classes into a run directory."""
  write_whole(workdir / _NAMES_FILE, json.dumps(names._asdict(), indent=2) + "\n")
