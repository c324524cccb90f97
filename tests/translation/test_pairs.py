"""Laws of user files: what was written is read; what cannot be read is named."""

import gzip
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relpos_jax.errors import InputError
from relpos_jax.translation import pairs

LINES = st.lists(
  st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=8).filter(
    # An empty last line is no line, a final \r and a first byte order mark are no text.
    lambda line: line and not line.endswith("\r") and not line.startswith("\ufeff")
  ),
  min_size=1,
  max_size=5,
)


def _write(path: pathlib.Path, content: bytes) -> pathlib.Path:
  path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
  return path


@given(
  LINES,
  st.sampled_from(["\n", "\r\n"]),
  st.booleans(),
  st.sampled_from([b"", b"\xef\xbb\xbf"]),
  st.sampled_from(["a.txt", "a.txt.gz"]),
)
def test_reading_gives_the_lines_written(tmp_path_factory, lines, end, final_end, mark, name):
  content = mark + (end.join(lines) + end * final_end).encode()
  assert pairs.read_lines(_write(tmp_path_factory.mktemp("lines") / name, content)) == lines


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r"])
def test_only_newlines_end_lines(tmp_path, inside):
  path = _write(tmp_path / "a", f"one{inside}two\nthree\n".encode())
  assert pairs.read_lines(path) == [f"one{inside}two", "three"]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_two_files_equal_one_of_two_columns(tmp_path, ending):
  source = _write(tmp_path / f"a.en{ending}", b"one\ntwo\n")
  target = _write(tmp_path / f"a.de{ending}", b"eins\nzwei\n")
  table = _write(tmp_path / f"a.tsv{ending}", b"one\teins\ntwo\tzwei\n")
  two = pairs.load(train=f"{source}, {target}", valid=f"{table}", test=f"{target},{source}")
  assert two.splits["train"] == two.splits["valid"] == [("one", "eins"), ("two", "zwei")]
  assert two.splits["test"] == [("eins", "one"), ("zwei", "two")]
  assert two.notes == ()


def test_splits_not_given_are_absent(tmp_path):
  assert set(pairs.load(train=str(_write(tmp_path / "a.tsv", b"one\teins"))).splits) == {"train"}


def test_home_folder_is_expanded(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  _write(tmp_path / "a.en", b"one")
  _write(tmp_path / "a.de", b"eins")
  assert pairs.load(train="~/a.en,~/a.de").splits["train"] == [("one", "eins")]


def test_pairs_with_an_empty_side_are_skipped_together_and_counted(tmp_path):
  source = _write(tmp_path / "a", b"one\n\nthree\n \nfive\n")
  target = _write(tmp_path / "b", b"eins\nzwei\n\nvier\nf\xc3\xbcnf\n")
  table = _write(tmp_path / "c", b"one\teins\n\n\tzwei\n")
  corpus = pairs.load(train=f"{source},{target}", valid=str(table), test=f"{source},{source}")
  assert corpus.splits["train"] == [("one", "eins"), ("five", "fünf")]
  assert corpus.splits["valid"] == [("one", "eins")]
  assert corpus.notes == (
    "3 pairs with an empty side skipped in train",
    "2 pairs with an empty side skipped in valid",
    "2 pairs with an empty side skipped in test",
  )


def _refusal(train: str) -> str:
  with pytest.raises(InputError) as caught:
    pairs.load(train=train)
  message = str(caught.value)
  assert "\n" not in message
  return message


def test_misaligned_files_are_named_with_their_line_counts(tmp_path):
  source, target = _write(tmp_path / "a", b"1\n2\n3\n"), _write(tmp_path / "b", b"1\n2\n")
  assert f"{source} has 3 lines and {target} has 2" in _refusal(f"{source},{target}")


@pytest.mark.parametrize("name", ["a", "a.gz"])
@pytest.mark.parametrize("wrong", [b"K\xf6ln", b"\xff\xfeK\x00"])
def test_invalid_utf8_is_named_with_its_line(tmp_path, name, wrong):
  path = _write(tmp_path / name, b"one\ntwo\r\n" + wrong + b"\nfour\n")
  assert f"invalid UTF-8 in {path}, line 3" in _refusal(f"{path},{path}")


@pytest.mark.parametrize("name", ["a", "a.gz"])
@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
def test_empty_file_is_named(tmp_path, name, content):
  full, empty = _write(tmp_path / "full", b"one\n"), _write(tmp_path / name, content)
  assert f"empty file {empty}" in _refusal(f"{full},{empty}")


def test_missing_file_is_named(tmp_path):
  full = _write(tmp_path / "full", b"one\n")
  assert f"no file {tmp_path / 'gone'}" in _refusal(f"{full},{tmp_path / 'gone'}")


def test_home_of_nobody_is_named():
  assert "no file ~nobody-of-this-name/gone" in _refusal("~nobody-of-this-name/gone")
  assert "x: File name too long" in _refusal("/" + "x" * 300)


def test_folder_is_named(tmp_path):
  assert f"cannot read {tmp_path}: Is a directory" in _refusal(str(tmp_path))


@pytest.mark.parametrize("damage", [lambda full: full[:-6], lambda full: full[:12] + full[13:]])
def test_damaged_gzip_is_named(tmp_path, damage):
  path = tmp_path / "a.gz"
  path.write_bytes(damage(gzip.compress(b"one\ttwo\n" * 9)))
  assert f"damaged gzip file {path}" in _refusal(str(path))


@pytest.mark.parametrize(("row", "columns"), [("eins", 1), ("eins\tzwei\tdrei", 3)])
def test_line_without_two_columns_is_named(tmp_path, row, columns):
  path = _write(tmp_path / "a.tsv", f"one\teins\n\n{row}\n".encode())
  assert f"{columns} columns in {path}, line 3" in _refusal(str(path))


def test_training_pairs_are_required(tmp_path):
  path = _write(tmp_path / "a.tsv", b"one\teins\n")
  assert "no training pairs" in _refusal("")
  with pytest.raises(InputError, match="no training pairs"):
    pairs.load(test=str(path))


def test_nothing_but_empty_lines_is_refused(tmp_path):
  path = _write(tmp_path / "a.tsv", b"\n\n")
  assert f"no pairs in train: every line of {path} has an empty side" in _refusal(str(path))


def test_more_than_two_files_are_refused():
  assert "3 files in 'a,b,c'" in _refusal("a,b,c")
