"""User files: the pairs written are read; files that cannot be read are named."""

import gzip
import pathlib

import pytest
from faults import refusal
from hypothesis import given
from hypothesis import strategies as st

from experiments.translation.corpus import load_pairs, read_lines

LETTERS = st.sampled_from("a\u2028\u2029\x85\x0b\x0c\x1c\r")  # str.splitlines ends lines at some
LINES = st.lists(
  st.text(
    st.characters(exclude_characters="\n", exclude_categories=["Cs"]) | LETTERS, max_size=8
  ).filter(
    # Reading drops an empty last line, a final \r and a byte order mark.
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
  assert read_lines(_write(tmp_path_factory.mktemp("lines") / name, content)) == lines


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_two_files_equal_one_of_two_columns(tmp_path, ending):
  source = _write(tmp_path / f"a.en{ending}", b"one\ntwo\n")
  target = _write(tmp_path / f"a.de{ending}", b"eins\nzwei\n")
  table = _write(tmp_path / f"a.tsv{ending}", b"one\teins\ntwo\tzwei\n")
  expected = [("one", "eins"), ("two", "zwei")]
  found = load_pairs(train=f"{source}, {target}", valid=f"{table}")
  assert found.splits == dict(train=expected, valid=expected) and found.notes == ()


def test_pairs_with_an_empty_side_are_skipped_together_and_counted(tmp_path):
  source = _write(tmp_path / "a", b"one\n\nthree\n \nfive\n")
  target = _write(tmp_path / "b", b"eins\nzwei\n\nvier\nf\xc3\xbcnf\n")
  table = _write(tmp_path / "c", b"one\teins\n\n\tzwei\n")
  corpus = load_pairs(train=f"{source},{target}", valid=str(table), test=f"{source},{source}")
  assert corpus.splits["train"] == [("one", "eins"), ("five", "fünf")]
  assert corpus.splits["valid"] == [("one", "eins")]
  assert corpus.notes == (
    "pairs with an empty side skipped in train: 3",
    "pairs with an empty side skipped in valid: 2",
    "pairs with an empty side skipped in test: 2",
  )


def test_test_sets_have_the_names_given(tmp_path):
  pairs = _write(tmp_path / "a.tsv", b"one\teins\n")
  corpus = load_pairs(train=str(pairs), test=dict(short=str(pairs), long=str(pairs), off=""))
  assert [*corpus.splits] == ["train", "short", "long"]
  for name in ("valid", "a/b", ""):
    refused = refusal(load_pairs, train=str(pairs), test={name: str(pairs)})
    assert f"data.pairs.test.{name}: give" in refused


FULL = b"one\n"
PACKED = gzip.compress(b"one\ttwo\n" * 9)


@pytest.mark.parametrize(
  ("files", "train", "message"),
  [
    (dict(a=b"1\n2\n3\n", b=b"1\n2\n"), "{a},{b}", "{a} has 3 lines and {b} has 2"),
    (dict(a=b"one\ntwo\r\nK\xf6ln\nfour\n"), "{a},{a}", "invalid UTF-8 in {a}, line 3"),
    (dict(a=FULL), "{a},{a}.gone", "no file {a}.gone"),
    (dict(a=PACKED[:-6]), "{a}", "damaged compressed file {a}"),
    (dict(a=b"one\teins\n\neins\n"), "{a}", "1 columns in {a}, line 3"),
    (dict(a=b"\n\n"), "{a}", "no pairs in train: every line of {a} has an empty side"),
    (dict(), "", "no training pairs"),
  ],
)
def test_wrong_files_are_named_in_one_line(tmp_path, files, train, message):
  names = dict(folder=tmp_path)
  for name, content in files.items():
    names[name] = tmp_path / name
    names[name].write_bytes(content)
  assert message.format(**names) in refusal(load_pairs, train=train.format(**names))
