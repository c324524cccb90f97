"""Saves and loads the names of a run's labels and classes."""

from experiments.files import Path
from experiments.graphs.graph import GraphNames
from experiments.training.workdir import read_json, write_json

_NAMES_FILE = "graphs.json"


def load_names(workdir: Path) -> GraphNames:
  """Reads the names of labels and classes in a run directory."""
  values = read_json(workdir / _NAMES_FILE)
  for kind in ("node_labels", "edge_labels", "classes"):
    values[kind] = tuple(values[kind])
  return GraphNames(**values)


def save_names(names: GraphNames, workdir: Path) -> None:
  """Writes the names of labels and classes into a run directory."""
  write_json(workdir / _NAMES_FILE, names._asdict())
