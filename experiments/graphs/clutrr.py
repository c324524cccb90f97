"""CLUTRR, a TFDS data set of kinship graphs: the answer follows from the labels of the edges."""

import ast
import csv
import hashlib
import io
import json
import pathlib
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from experiments.data.builders import FilesBuilder, load_files
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


def load(path: str = "", valid_share: float = 0.1) -> GraphData:
  """Loads chains of kinship (Sinha et al. 2019): splits train, valid, and test_2 to test_10.

  Nodes are persons with one common label. The label of an edge from a to b is the relation of b to
  a; the target is the relation of the last person of the chain to the first. Training chains have 2
  to 4 relations (15,083 rows, 2,340 distinct graphs); test_k has k. Upstream has no valid split: it
  is a `valid_share` of the distinct training graphs, chosen by hash, and none of them remains in
  train. The graphs of test_2 occur in train; those of the other test splits do not.

  From the repository of Minervini et al. 2020 (3.1 MB), or from a file in the folder `path`, as in
  `load_files`: the same archive, or data_db9b8f04.graphs.jsonl.gz, its graphs alone.

  Raises InputError for a missing or wrong file, or no network.

  >>> load(path="ctp/data/clutrr-emnlp").splits["train"][0].labels  # doctest: +SKIP
  array([4, 1], dtype=int32)
  """
  has_graphs = bool(path) and (pathlib.Path(path).expanduser() / f"{_GRAPHS}.gz").exists()
  found = load_files(Clutrr, path, _graph, _GRAPHS if has_graphs else "")
  splits = {name: found[name] for name in SPLITS.values()}
  is_valid = [(graph, _hash(graph) < valid_share) for graph in splits["train"]]
  train, valid = ([graph for graph, held in is_valid if held is part] for part in (False, True))
  note = f"CLUTRR: {len(valid):,} of {len(is_valid):,} training graphs are for validation"
  names = GraphNames(("person",), RELATIONS, ANSWERS)
  return GraphData(splits | dict(train=train, valid=valid), names, (note,))


class Clutrr(FilesBuilder):
  """TFDS builder of CLUTRR, data set db9b8f04: training chains have 2, 3 and 4 relations."""

  KEY = "clutrr"
  UPSTREAM = f"{_ZIP}, from data/clutrr-emnlp of github.com/uclnlp/ctp"
  URL = (
    "https://raw.githubusercontent.com/uclnlp/ctp/8cd7e639024f2aa28bdae4783e940cad784580ae/"
    "data/clutrr-emnlp/"
  )
  FILES = {  # noqa: RUF012
    _ZIP: (3_115_620, "52571c7feb2dc628d6cd56cc9e03f2572d343fdccbbc5c7301caa02f12f1b7bd"),
    # The same graphs without the stories.
    _GRAPHS: (3_144_564, "e202bfa46d4759e7bca17666e24b2a73c3b88208f9e0968a0022c95400649194"),
  }

  def _info(self) -> tfds.core.DatasetInfo:
    def numbers(*shape):
      return tfds.features.Tensor(shape=shape, dtype=np.int32)

    return self._about(
      features=tfds.features.FeaturesDict(
        dict(edges=numbers(None, 3), query=numbers(2), target=numbers())
      ),
      license="CC BY-NC 4.0",
      citation="Sinha et al. 2019, arXiv:1908.06177; Minervini et al. 2020, arXiv:2007.06477.",
    )

  @classmethod
  def read(cls, content: Callable[[str], bytes], config: str) -> dict[str, list[dict]]:
    splits = {name: [] for name in SPLITS.values()}
    if config == _GRAPHS:
      for row in map(json.loads, content(_GRAPHS).decode().splitlines()):
        splits[SPLITS[row["split"]]].append(_example(row))
      return splits
    columns = dict(story_edges="edges", edge_types="labels", query_edge="query")
    with zipfile.ZipFile(io.BytesIO(content(_ZIP))) as archive:
      for name, split in SPLITS.items():
        for row in csv.DictReader(io.StringIO(archive.read(f"{name}.csv").decode(), newline="")):
          values = {ours: ast.literal_eval(row[theirs]) for theirs, ours in columns.items()}
          splits[split].append(_example(row | values))
    return splits


def _example(row: Mapping[str, Any]) -> dict[str, Any]:
  labels = map(RELATIONS.index, row["labels"])
  edges = [(*edge, label) for edge, label in zip(row["edges"], labels, strict=True)]
  return dict(edges=edges, query=row["query"], target=ANSWERS.index(row["target"]))


def _graph(item: Mapping[str, Any]) -> Graph:
  number = int(np.array(item["edges"])[:, :2].max()) + 1
  return Graph.of([0] * number, item["edges"], target=item["target"], query=item["query"])


def _hash(graph: Graph) -> float:
  """Hashes a graph to a number below 1; copies of a graph have the same."""
  parts = graph.senders, graph.receivers, graph.labels, graph.query
  text = json.dumps([part.tolist() for part in parts])
  return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
