"""Downloads and verifies published data sets, and holds examples by split."""

import contextlib
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from experiments.errors import InputError
from experiments.files import read_content, replace_file

CACHE = "~/.cache/relpos_jax/data"


class Corpus(NamedTuple):
  """Holds a data set: pairs of sentences or pieces of music, by split.

  Attributes:
    splits: train, valid and test sets. A split is any random-access sequence, in memory
      or read from disk item by item.
    notes: lines for the log.
    skipped: for each split, the indices of pairs in its files that were left out.
    bad_files: a line for each file that cannot be used, with the reason.
    test_files: the files of a user's own test sets, by name. A resumed run may have
      others.
  """

  splits: Mapping[str, Sequence[Any]]
  notes: tuple[str, ...] = ()
  skipped: Mapping[str, tuple[int, ...]] = MappingProxyType({})
  bad_files: tuple[str, ...] = ()
  test_files: Mapping[str, str] = MappingProxyType({})


class Upstream(NamedTuple):
  """Describes a published data set: the address and the SHA-256 of each file.

  Attributes:
    key: the data set's key in `config.data`. A user may have copies of the files in the
      folder `config.data.KEY.path`.
    where: names the published files in error messages.
    url: the start of the files' addresses. The address of a file is `url` + its name.
    files: the SHA-256 of each file, by name.
  """

  key: str
  where: str
  url: str
  files: Mapping[str, str]

  def read(self, name: str, path: str = "") -> bytes:
    """Reads a file from the folder `path`, or downloads it if `path` is empty.

    In the folder it may be compressed as `name`.gz. Downloads are kept in `CACHE`, if
    that is writable.

    Raises InputError if the file is missing, damaged or not the published one, or if
    there is no network.
    """
    if path:
      return self._read_copy(pathlib.Path(path, name).expanduser())
    cached = pathlib.Path(CACHE, self.key, name).expanduser()
    with contextlib.suppress(OSError):
      content = cached.read_bytes()
      if _sha256(content) == self.files[name]:
        return content
    content = self._download(name)
    with contextlib.suppress(OSError):
      cached.parent.mkdir(parents=True, exist_ok=True)
      with replace_file(cached) as file:
        file.write(content)
    return content

  def _read_copy(self, file: pathlib.Path) -> bytes:
    compressed = file.with_name(f"{file.name}.gz")
    try:
      content = read_content(compressed) if compressed.exists() else file.read_bytes()
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
