"""J. S. Bach's chorales, four voices on a grid of 16th notes, prepared by TFDS."""

import json
import pathlib
from collections.abc import Iterator

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.checksums import UrlInfo
from tensorflow_datasets.core.utils import Size

from relpos_jax.data.builders import SPLITS, prepare, read_split, upstream_content
from relpos_jax.files import local_path
from relpos_jax.music import voices
from relpos_jax.music.data import Music

_NAME = "Jsb16thSeparated.json"
_URL = (
  "https://raw.githubusercontent.com/czhuang/JSB-Chorales-dataset/"
  f"9a7f733ddb4ed91f48da64ac7f0f621c34aadd4d/{_NAME}"
)
_UPSTREAM = "github.com/czhuang/JSB-Chorales-dataset"
_REMEDY = f"to use a local file, give path=FOLDER with {_NAME} of {_UPSTREAM}"
# The uncompressed file.
_SIZE = 1_666_444
_SHA256 = "79294cc374f9252e95ef4b703161524c1c53dc1f712c236f00f1c1f5d54af5a7"
_SPLITS = {"train": "train", "validation": "valid", "test": "test"}


def load(path: str = "") -> Music:
  """Loads 229 chorales for training, 76 valid, 77 test: Boulanger-Lewandowski et al. 2012's splits.

  `relpos_jax.music.voices` writes them as tokens; upstream's order is kept. TFDS prepares them once
  under TFDS_DATA_DIR (default ~/tensorflow_datasets) from the upstream repository, 1.7 MB, or from
  a copy of its file, plain or .gz, in the folder `path`. The sha256 of the file is checked.

  Raises InputError: a file is missing or wrong, or there is no network.

  >>> music = load("JSB-Chorales-dataset")  # doctest: +SKIP
  >>> music.splits["train"][0][:8]  # doctest: +SKIP
  array([78, 74, 69, 62, 78, 74, 69, 62])
  """
  folder = local_path(path) if path else None
  if folder:
    upstream_content(folder, _NAME, _SHA256, _UPSTREAM)
  builder = prepare(JsbChorales, _REMEDY, url="" if folder else _URL, manual_dir=folder)
  tokens = lambda item: voices.encode(item["grid"])
  return Music({split: read_split(builder, name, tokens) for split, name in SPLITS.items()})


class JsbChorales(tfds.core.GeneratorBasedBuilder):
  """The TFDS builder of the chorales, from a local folder or from upstream."""

  VERSION = tfds.core.Version("1.0.0")
  MANUAL_DOWNLOAD_INSTRUCTIONS = f"{_NAME} of {_UPSTREAM}."
  # TFDS checks size and checksum; a wrong download is not cached.
  url_infos = {_URL: UrlInfo(size=Size(_SIZE), checksum=_SHA256, filename=_NAME)}  # noqa: RUF012

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description="Chorales by Bach: MIDI pitches of four voices per 16th note, -1 for silence.",
      features=tfds.features.FeaturesDict(
        {"grid": tfds.features.Tensor(shape=(None, 4), dtype=np.int64)}
      ),
      homepage=f"https://{_UPSTREAM}",
      license="None stated; the scores are in the public domain.",
      citation="Boulanger-Lewandowski et al. 2012, arXiv:1206.6392; Huang et al. 2017, Coconet.",
      # Upstream's order makes scores of single pieces comparable.
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager: tfds.download.DownloadManager):
    folder = pathlib.Path(dl_manager._manual_dir)
    if any(folder.glob(f"{_NAME}*")):
      content = upstream_content(folder, _NAME, _SHA256, _UPSTREAM)
    else:
      content = pathlib.Path(dl_manager.download(_URL)).read_bytes()
    pieces = json.loads(content)
    return {split: self._generate_examples(pieces[name]) for split, name in _SPLITS.items()}

  def _generate_examples(self, grids) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    for index, grid in enumerate(grids):
      yield index, dict(grid=np.array(grid, np.int64))
