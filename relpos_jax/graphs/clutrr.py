"""CLUTRR, a TFDS data set of kinship graphs: the answer follows from the labels of the edges."""

import ast
import csv
import gzip
import hashlib
import io
import json
import pathlib
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.checksums import UrlInfo
from tensorflow_datasets.core.utils import Size

from relpos_jax.data.builders import prepare, read_split, upstream_content
from relpos_jax.files import local_path
from relpos_jax.graphs.graph import Graph, GraphData, GraphNames

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

_URL = (
  "https://raw.githubusercontent.com/uclnlp/ctp/8cd7e639024f2aa28bdae4783e940cad784580ae/"
  "data/clutrr-emnlp/data_db9b8f04.zip"
)
_ZIP, _GRAPHS = "data_db9b8f04.zip", "data_db9b8f04.graphs.jsonl.gz"
_UPSTREAM = "data/clutrr-emnlp of github.com/uclnlp/ctp"
_REMEDY = (
  f"to use a local file, give --config.data.clutrr.path=FOLDER with {_ZIP}, from {_UPSTREAM}"
)
# Bytes and SHA-256 of the upstream archive, and of its graphs without the stories.
_FILES = {
  _ZIP: (3_115_620, "52571c7feb2dc628d6cd56cc9e03f2572d343fdccbbc5c7301caa02f12f1b7bd"),
  _GRAPHS: (448_045, "e6f59824af2eb0a00e09094034fa16584b28571c40bd3a9e616f401f2615dd27"),
}


def load(path: str = "", valid_share: float = 0.1) -> GraphData:
  """Loads chains of kinship (Sinha et al. 2019): splits train, valid, and test_2 to test_10.

  Nodes are persons with one common label. The label of an edge from a to b is the relation of b to
  a; the target is the relation of the last person of the chain to the first. Training chains have 2
  to 4 relations (15,083 rows, 2,340 distinct graphs); test_k has k. Upstream has no valid split: it
  is a `valid_share` of the distinct training graphs, chosen by hash, and none of them remains in
  train. The graphs of test_2 occur in train; those of the other test splits do not.

  Prepared once under TFDS_DATA_DIR from the repository of Minervini et al. 2020 (3.1 MB), or from a
  file in the folder `path`: the same archive, or data_db9b8f04.graphs.jsonl.gz, its graphs alone.

  Raises InputError for a missing or wrong file, or no network.

  >>> load(path="ctp/data/clutrr-emnlp").splits["train"][0].labels  # doctest: +SKIP
  array([4, 1], dtype=int32)
  """
  folder = local_path(path) if path else None
  if folder:
    name = _GRAPHS if (folder / _GRAPHS).exists() else _ZIP
    upstream_content(folder, name, _FILES[name][1], _UPSTREAM)
  builder = prepare(Clutrr, _REMEDY, url="" if folder else _URL, manual_dir=folder)
  splits = {name: read_split(builder, name, _graph) for name in SPLITS.values()}
  is_valid = [(graph, _hash(graph) < valid_share) for graph in splits["train"]]
  train, valid = ([graph for graph, held in is_valid if held is part] for part in (False, True))
  note = f"CLUTRR: {len(valid):,} of {len(is_valid):,} training graphs are for validation"
  names = GraphNames(("person",), RELATIONS, ANSWERS)
  return GraphData(splits | dict(train=train, valid=valid), names, (note,))


class Clutrr(tfds.core.GeneratorBasedBuilder):
  """TFDS builder of CLUTRR, data set db9b8f04: training chains have 2, 3 and 4 relations."""

  VERSION = tfds.core.Version("1.0.0")
  MANUAL_DOWNLOAD_INSTRUCTIONS = f"{_ZIP} of {_UPSTREAM}."
  # TFDS checks downloads against these and does not cache a wrong one.
  url_infos = {  # noqa: RUF012
    _URL: UrlInfo(size=Size(_FILES[_ZIP][0]), checksum=_FILES[_ZIP][1], filename=_ZIP)
  }

  def _info(self) -> tfds.core.DatasetInfo:
    numbers = lambda *shape: tfds.features.Tensor(shape=shape, dtype=np.int32)
    return tfds.core.DatasetInfo(
      builder=self,
      description="Kinship graphs: directed labelled edges, a pair of persons, their relation.",
      features=tfds.features.FeaturesDict(
        dict(edges=numbers(None, 3), query=numbers(2), target=numbers())
      ),
      homepage="https://github.com/uclnlp/ctp",
      license="CC BY-NC 4.0",
      citation="Sinha et al. 2019, arXiv:1908.06177; Minervini et al. 2020, arXiv:2007.06477.",
      disable_shuffling=True,  # keeps upstream's order
    )

  def _split_generators(self, dl_manager: tfds.download.DownloadManager):
    folder = dl_manager._manual_dir
    if folder and (graphs := pathlib.Path(folder, _GRAPHS)).exists():
      rows = _rows_of_graphs(graphs)
    else:
      rows = _rows_of_archive(dl_manager.download(_URL))
    return {split: self._generate_examples(rows[split]) for split in SPLITS.values()}

  def _generate_examples(self, rows) -> Iterator[tuple[int, dict[str, Any]]]:
    for index, row in enumerate(rows):
      labels = map(RELATIONS.index, row["labels"])
      edges = [(*edge, label) for edge, label in zip(row["edges"], labels, strict=True)]
      yield index, dict(edges=edges, query=row["query"], target=ANSWERS.index(row["target"]))


def _rows_of_graphs(file: pathlib.Path) -> dict[str, list[Mapping[str, Any]]]:
  splits = {name: [] for name in SPLITS.values()}
  for row in map(json.loads, gzip.decompress(file.read_bytes()).decode().splitlines()):
    splits[SPLITS[row["split"]]].append(row)
  return splits


def _rows_of_archive(file) -> dict[str, list[Mapping[str, Any]]]:
  columns = dict(story_edges="edges", edge_types="labels", query_edge="query")
  splits = {}
  with zipfile.ZipFile(file) as archive:
    for name, split in SPLITS.items():
      rows = csv.DictReader(io.StringIO(archive.read(f"{name}.csv").decode(), newline=""))
      splits[split] = [
        {ours: ast.literal_eval(row[theirs]) for theirs, ours in columns.items()}
        | dict(target=row["target"])
        for row in rows
      ]
  return splits


def _graph(item: Mapping[str, np.ndarray]) -> Graph:
  number = int(item["edges"][:, :2].max()) + 1
  return Graph.of([0] * number, item["edges"], target=item["target"], query=item["query"])


def _hash(graph: Graph) -> float:
  """Hashes a graph to a number below 1; copies of a graph have the same."""
  parts = graph.senders, graph.receivers, graph.labels, graph.query
  text = json.dumps([part.tolist() for part in parts])
  return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
