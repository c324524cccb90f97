"""Published files come from a folder, an address or what was kept of it."""

import gzip
import hashlib
import pathlib

import pytest
from faults import refusal

from experiments.data.upstream import Upstream

CONTENT = b"a\nb\n"
NOWHERE = "http://127.0.0.1:9/"


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
  (tmp_path / "files").mkdir()
  (tmp_path / "files" / "a.txt").write_bytes(CONTENT)
  return tmp_path / "files"


def source(url: str = NOWHERE) -> Upstream:
  files = {"a.txt": hashlib.sha256(CONTENT).hexdigest()}
  return Upstream("mine", "the attic", url, files)


def refused(url: str = NOWHERE, path: object = "") -> str:
  return refusal(source(url).read, "a.txt", str(path))


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_copy_is_read_plain_or_packed_and_nothing_is_kept(folder, kept, is_packed):
  if is_packed:
    (folder / "a.txt.gz").write_bytes(gzip.compress(CONTENT))
    (folder / "a.txt").unlink()
  assert source().read("a.txt", str(folder)) == CONTENT
  assert not kept.exists()


def test_wrong_and_missing_copies_are_named(folder):
  (folder / "a.txt").write_bytes(b"<html>")
  message = refused(path=folder)
  assert message.startswith(f"wrong file {folder}/a.txt: its sha256 is")
  assert "the attic" in message
  (folder / "a.txt").unlink()
  message = refused(path=folder)
  assert message.startswith(f"cannot read {folder}/a.txt: No such file")
  assert "the attic" in message


def test_a_download_is_kept_and_made_again_where_what_is_kept_is_damaged(
  folder, kept, serve
):
  with serve(folder) as url:
    assert source(url).read("a.txt") == CONTENT
  assert source().read("a.txt") == CONTENT  # without a network
  (file,) = [path for path in kept.rglob("*") if path.is_file()]
  file.write_bytes(CONTENT[:2])
  no_answer = f"cannot download {NOWHERE}a.txt: no answer from 127.0.0.1"
  assert refused().startswith(no_answer)
  with serve(folder) as url:
    assert source(url).read("a.txt") == CONTENT == file.read_bytes()


def test_what_cannot_be_downloaded_is_named_with_the_remedy_and_not_kept(
  folder, kept, serve
):
  remedy = "; to use local files, give a folder with the attic: "
  remedy += "--config.data.mine.path=FOLDER, or in a notebook config.data.mine.path"
  (folder / "a.txt").write_bytes(b"<html>")
  with serve(folder) as url:
    problem = f"cannot download {url}a.txt: it is not the file published"
    assert refused(url) == problem + remedy
    (folder / "a.txt").unlink()
    assert refused(url) == f"cannot download {url}a.txt: status 404{remedy}"
  assert refused().endswith(remedy)
  assert not kept.exists()
