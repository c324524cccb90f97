"""Molecules with bond labels, as TFDS data sets, and any folder in TU format."""

import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.checksums import UrlInfo
from tensorflow_datasets.core.utils import Size

from relpos_jax.data.builders import damage_named, data_dir, prepare, read_split, verify
from relpos_jax.errors import InputError
from relpos_jax.files import local_path
from relpos_jax.graphs.graph import Graph, GraphData, GraphNames
from relpos_jax.graphs.tu_format import read_folder

_URL = (
  "https://raw.githubusercontent.com/nd7141/graph_datasets/"
  "97da5acfd1f8137f7776783533717182d3e5a6fc/datasets/"
)
_UPSTREAM = "datasets of github.com/nd7141/graph_datasets"
_REMEDY = f"to use a file at hand, give path=FOLDER with NAME.zip from {_UPSTREAM}"
# Bytes and sha256 of the archives upstream.
_FILES = {
  "MUTAG": (17_653, "ea3576783c61cd2b3a942e9e3bab821cd4b359f5409fd53b31192c721207f6fa"),
  "Mutagenicity": (678_585, "387ce29718d08c9788521fb3a8842b67bc16751907414ac69dd3c6c113b95e40"),
}
_NAMES = ("node_labels", "edge_labels", "classes")


def load(name: str = "MUTAG", path: str = "") -> GraphData:
  """Graphs and their classes, in one split, "all": see `stratified_folds`.

  "MUTAG" (135 molecules) and "Mutagenicity" (3,335) are prepared once under TFDS_DATA_DIR from
  Ivanov et al. 2019, who left isomorphic copies out (figures for the 188 of MUTAG do not apply), or
  from the archive of that name in the folder `path`. Any other name, or "" for the only one there,
  is that of a data set in TU format in the folder `path`: see `relpos_jax.graphs.tu_format`. Such a
  folder is read anew each time. The two names are of the archives alone, whose sums are checked.

  Raises InputError for an unknown name, a missing or wrong file, no network, a folder that is not
  in TU format.

  >>> load("MUTAG", path="graph_datasets/datasets").names.edge_labels  # doctest: +SKIP
  ('0', '1', '2', '3')
  """
  folder = local_path(path) if path else None
  if folder and name not in _FILES:
    return read_folder(folder, name)
  if name not in _FILES:
    raise InputError(
      f"unknown data set {name!r}: give the path of its folder, or {' or '.join(_FILES)}"
    )
  if folder:
    wanted = f"a folder with {name}.zip from {_UPSTREAM}, or with an empty name one in TU format"
    verify(folder / f"{name}.zip", _FILES[name][1], _UPSTREAM, wanted)
  make = lambda: TU(config=name, data_dir=data_dir())
  url = "" if folder else f"{_URL}{name}.zip"
  builder = prepare(make, _REMEDY, url=url, manual_dir=folder)
  with damage_named(builder):
    graphs = [*read_split(builder, "train", _graph)]
    names = GraphNames(*(tuple(builder.info.metadata[kind]) for kind in _NAMES))
  return GraphData(dict(all=graphs), names)


class TU(tfds.core.GeneratorBasedBuilder):
  """TFDS builder of data sets in TU format without attributes; one config each."""

  VERSION = tfds.core.Version("1.0.0")
  BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name) for name in _FILES]  # noqa: RUF012
  MANUAL_DOWNLOAD_INSTRUCTIONS = f"NAME.zip of {_UPSTREAM}."
  # Where TFDS looks sizes and checksums up: a wrong download is refused and not cached.
  url_infos = {  # noqa: RUF012
    f"{_URL}{name}.zip": UrlInfo(size=Size(size), checksum=sha256, filename=f"{name}.zip")
    for name, (size, sha256) in _FILES.items()
  }

  def _info(self) -> tfds.core.DatasetInfo:
    numbers = lambda *shape: tfds.features.Tensor(shape=shape, dtype=np.int32)
    return tfds.core.DatasetInfo(
      builder=self,
      description="Molecules as graphs of labelled atoms and bonds, and a class of each.",
      features=tfds.features.FeaturesDict(
        dict(nodes=numbers(None), edges=numbers(None, 3), target=numbers())
      ),
      homepage="https://chrsmrrs.github.io/datasets",
      license="Free for research.",
      citation="Morris et al. 2020, arXiv:2007.08663; Ivanov et al. 2019, arXiv:1910.12091.",
      metadata=tfds.core.MetadataDict(),
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager: tfds.download.DownloadManager):
    assert self.builder_config is not None  # There is no default.
    name = self.builder_config.name
    archive = zipfile.ZipFile(dl_manager.download(f"{_URL}{name}.zip"))
    data = read_folder(zipfile.Path(archive, f"{name}/"), name)
    self.info.metadata.update({kind: [*getattr(data.names, kind)] for kind in _NAMES})
    return {"train": self._generate_examples(data.splits["all"])}

  def _generate_examples(self, graphs) -> Iterator[tuple[int, dict[str, Any]]]:
    for index, graph in enumerate(graphs):
      edges = np.column_stack([graph.senders, graph.receivers, graph.labels])
      yield index, dict(nodes=graph.nodes, edges=edges, target=graph.target)


def _graph(item) -> Graph:
  return Graph.of(item["nodes"], item["edges"], target=item["target"])
