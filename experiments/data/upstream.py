"""Data sets by split, and their published files: copies of users, or downloads."""

import contextlib
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from experiments.errors import InputError
from experiments.files import Path, read_content, replace_file, write_whole

CACHE = "~/.cache/relpos_jax/data"
SKIPPED = "skipped.txt"  # of a run directory


class Corpus(NamedTuple):
  """Examples by split, pairs of sentences or pieces of music: train, valid and test
  sets.

  A split is any random-access sequence, in memory or read from disk item by item.
  `notes` are lines for the log. `skipped` are the indices of the pairs in a split's
  files that are not in the split. `bad_files` has a line for each file that cannot be
  used, with the reason.
  """

  splits: Mapping[str, Sequence[Any]]
  notes: tuple[str, ...] = ()
  skipped: Mapping[str, tuple[int, ...]] = MappingProxyType({})
  bad_files: tuple[str, ...] = ()


def write_skipped(data: Any, workdir: Path) -> None:
  """Writes the list of skipped files into a run directory, if there are any."""
  (workdir / SKIPPED).unlink(missing_ok=True)  # of an earlier start of the run
  lines = getattr(data, "bad_files", ())  # graphs have none
  if lines:
    write_whole(workdir / SKIPPED, "".join(f"{line}\n" for line in lines))


class Upstream(NamedTuple):
  """A folder of published files, each known by its SHA-256."""

  # Of the data set in `config.data`; its `path` may be a folder with the files.
  key: str
  where: str  # the folder in words
  url: str  # the folder's address, which the name of a file completes
  files: Mapping[str, str]  # SHA-256 by name

  def read(self, name: str, path: str = "") -> bytes:
    """Returns the content of a file: of a user's copy in the folder `path`, or of a
    download.

    The copy may be packed as `name`.gz. Downloads are kept in `CACHE`, if it can be
    written.

    Raises InputError: the file is missing, damaged or not the published one, or there
    is no network.
    """
    if path:
      return self._copy(pathlib.Path(path, name).expanduser())
    kept = pathlib.Path(CACHE, self.key, name).expanduser()
    with contextlib.suppress(OSError):
      content = kept.read_bytes()
      if _sha256(content) == self.files[name]:
        return content
    content = self._download(name)
    with contextlib.suppress(OSError):
      kept.parent.mkdir(parents=True, exist_ok=True)
      with replace_file(kept) as file:
        file.write(content)
    return content

  def _copy(self, file: pathlib.Path) -> bytes:
    packed = file.with_name(f"{file.name}.gz")
    try:
      content = read_content(packed) if packed.exists() else file.read_bytes()
    except OSError as error:
      raise InputError(
        f"cannot read {file}: {error.strerror}; path must be a folder with "
        f"{self.where}, or empty to download it"
      ) from None
    digest, wanted = _sha256(content), self.files[file.name]
    if digest != wanted:
      raise InputError(
        f"wrong file {file}: its sha256 is {digest[:12]}..., upstream's is "
        f"{wanted[:12]}...; copy it again from {self.where}, "
        "or leave path empty to download it"
      )
    return content

  def _download(self, name: str) -> bytes:
    import requests

    url = f"{self.url}{name}"
    key = f"config.data.{self.key}.path"
    remedy = f"to use local files, give a folder with {self.where}: --{key}=FOLDER"
    remedy += f", or in a notebook {key}"
    try:
      answer = requests.get(url, timeout=20)
      if answer.ok and _sha256(answer.content) == self.files[name]:
        return answer.content
      reason = f"status {answer.status_code}"
      if answer.ok:
        reason = "it is not the file published"
    except requests.RequestException as error:
      reason = f"no answer from {urlsplit(url).hostname} ({type(error).__name__})"
    raise InputError(f"cannot download {url}: {reason}; {remedy}")


def _sha256(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()
