"""CLUTRR, a data set of kinship graphs: the answer follows from the labels of the edges."""

import ast
import csv
import hashlib
import io
import json
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.data.upstream import Upstream
from experiments.graphs.graph import Graph, GraphData, GraphNames

RELATIONS = (
  "aunt", "brother", "daughter", "father", "granddaughter", "grandfather", "grandmother",
  "grandson", "husband", "mother", "sister", "son", "uncle", "wife",
)  # fmt: skip
ANSWERS = (
  "aunt", "brother", "daughter", "daughter-in-law", "father", "father-in-law", "granddaughter",
  "grandfather", "grandmother", "grandson", "mother", "mother-in-law", "nephew", "niece", "sister",
  "son", "son-in-law", "uncle",
)  # fmt: skip
# Our splits by upstream's: a chain of test_k has k relations.
SPLITS = {"1.2,1.3,1.4_train": "train"} | {f"1.{k}_test": f"test_{k}" for k in range(2, 11)}

_ZIP, _GRAPHS = "data_db9b8f04.zip", "data_db9b8f04.graphs.jsonl"
UPSTREAM = Upstream(
  "clutrr",
  f"{_ZIP}, from data/clutrr-emnlp of github.com/uclnlp/ctp",
  "https://raw.githubusercontent.com/uclnlp/ctp/8cd7e639024f2aa28bdae4783e940cad784580ae/"
  "data/clutrr-emnlp/",
  {
    _ZIP: "52571c7feb2dc628d6cd56cc9e03f2572d343fdccbbc5c7301caa02f12f1b7bd",
    # The same graphs without the stories.
    _GRAPHS: "e202bfa46d4759e7bca17666e24b2a73c3b88208f9e0968a0022c95400649194",
  },
)


def load(path: str = "", valid_share: float = 0.1) -> GraphData:
  """Loads chains of kinship (Sinha et al. 2019): splits train, valid, and test_2 to test_10.

  Nodes are persons with one common label. The label of an edge from a to b is the relation of b to
  a; the target is the relation of the last person of the chain to the first. Training chains have 2
  to 4 relations (15,083 rows, 2,340 distinct graphs); test_k has k. Upstream has no valid split: it
  is a `valid_share` of the distinct training graphs, chosen by hash, and none of them remains in
  train. The graphs of test_2 occur in train; those of the other test splits do not.

  From the repository of Minervini et al. 2020 (3.1 MB), or from a file in the folder `path`, as in
  `Upstream`: the same archive, or data_db9b8f04.graphs.jsonl.gz, its graphs alone.

  Raises InputError for a missing or wrong file, or no network.

  >>> load(path="ctp/data/clutrr-emnlp").splits["train"][0].labels  # doctest: +SKIP
  array([4, 1], dtype=int32)
  """
  splits = _read(path)
  is_valid = [(graph, _hash(graph) < valid_share) for graph in splits["train"]]
  train, valid = ([graph for graph, held in is_valid if held is part] for part in (False, True))
  note = f"CLUTRR: {len(valid):,} of {len(is_valid):,} training graphs are for validation"
  names = GraphNames(("person",), RELATIONS, ANSWERS)
  return GraphData(splits | dict(train=train, valid=valid), names, (note,))


def _read(path: str) -> dict[str, list[Graph]]:
  """Returns the graphs by split."""
  splits = {name: [] for name in SPLITS.values()}
  if path and (pathlib.Path(path).expanduser() / f"{_GRAPHS}.gz").exists():
    for row in map(json.loads, UPSTREAM.read(_GRAPHS, path).decode().splitlines()):
      splits[SPLITS[row["split"]]].append(_graph(row))
    return splits
  columns = dict(story_edges="edges", edge_types="labels", query_edge="query")
  with zipfile.ZipFile(io.BytesIO(UPSTREAM.read(_ZIP, path))) as archive:
    for name, split in SPLITS.items():
      for row in csv.DictReader(io.StringIO(archive.read(f"{name}.csv").decode(), newline="")):
        values = {ours: ast.literal_eval(row[theirs]) for theirs, ours in columns.items()}
        splits[split].append(_graph(row | values))
  return splits


def _graph(row: Mapping[str, Any]) -> Graph:
  labels = map(RELATIONS.index, row["labels"])
  edges = [(*edge, label) for edge, label in zip(row["edges"], labels, strict=True)]
  number = int(np.array(edges)[:, :2].max()) + 1
  target = ANSWERS.index(row["target"])
  return Graph.of([0] * number, edges, target=target, query=row["query"])


def _hash(graph: Graph) -> float:
  """Hashes a graph to a number below 1; copies of a graph have the same."""
  parts = graph.senders, graph.receivers, graph.labels, graph.query
  text = json.dumps([part.tolist() for part in parts])
  return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
