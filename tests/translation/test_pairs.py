"""User files: the pairs written are read; files that cannot be read are named."""

import bz2
import csv
import gzip
import pathlib

import pytest
from faults import refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.translation.corpus import load_pairs, read_lines, read_pairs

# str.splitlines ends lines at some of them.
LETTERS = st.sampled_from("a\u2028\u2029\x85\x0b\x0c\x1c\r")
ANY = st.characters(exclude_characters="\n", exclude_categories=["Cs"])
LINE = st.text(ANY | LETTERS, min_size=1, max_size=8).filter(
  # Reading drops a final \r and a byte order mark.
  lambda line: not line.endswith("\r") and not line.startswith("\ufeff")
)
LINES = st.lists(LINE, min_size=1, max_size=5)
PACK = {".gz": gzip.compress, ".bz2": bz2.compress}


def write(path: pathlib.Path, content: bytes) -> pathlib.Path:
  pack = PACK.get(path.suffix, bytes)
  path.write_bytes(pack(content))
  return path


@given(
  LINES,
  st.sampled_from(["\n", "\r\n"]),
  st.booleans(),
  st.sampled_from([b"", b"\xef\xbb\xbf"]),
  st.sampled_from(["a.txt", "a.txt.gz", "a.txt.bz2"]),
)
def test_reading_gives_the_lines_written(
  tmp_path_factory, lines, end, final_end, mark, name
):
  content = mark + (end.join(lines) + end * final_end).encode()
  path = write(tmp_path_factory.mktemp("lines") / name, content)
  assert read_lines(path) == lines


def test_pairs_with_an_empty_side_are_skipped_together_and_named(tmp_path):
  source = write(tmp_path / "a.gz", b"one\n\nthree\n \nfive\n" + b"\n" * 2000)
  target = write(tmp_path / "b", b"eins\nzwei\n\nvier\nf\xc3\xbcnf\n" + b"\n" * 2000)
  table = write(tmp_path / "c", b"one\teins\n\n\tzwei\n")
  corpus = load_pairs(train=f"{source}, {target}", valid=str(table))
  assert corpus.splits["train"] == [("one", "eins"), ("five", "fünf")]
  assert corpus.splits["valid"] == [("one", "eins")]
  assert corpus.notes == (
    "pairs with an empty side skipped in train: 2,003 (lines: 2, 3, 4, 6, 7, ...)",
    "pairs with an empty side skipped in valid: 2 (lines: 2, 3)",
  )
  assert corpus.skipped["valid"] == (1, 2)


@pytest.mark.parametrize("name", ["valid", "a b", ""])
def test_wrong_names_of_test_sets_are_refused(name):
  refused = refusal(load_pairs, train="a.tsv", test=f"{name}=a.tsv")
  assert f"data.pairs.test.{name}: give" in refused


def write_table(path: pathlib.Path, *lines: str) -> str:
  path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
  return str(path)


def test_two_columns_of_several_are_chosen(tmp_path):
  table = write_table(tmp_path / "a", "1\tone\teins\tCC-BY", "", "2\ttwo\tzwei")
  corpus = load_pairs(train=f"{table}:2,3", valid=f"{table}:3,1")
  assert corpus.splits["train"] == [("one", "eins"), ("two", "zwei")]
  assert corpus.splits["valid"] == [("eins", "1"), ("zwei", "2")]
  refused = refusal(load_pairs, train=table)
  assert refused == f"4 columns in {table}, line 1: choose two, as {table}:1,2"
  refused = refusal(load_pairs, train=f"{table}:1,4")
  assert refused.startswith(f"3 columns in {table}, line 3: want 4 or more")


# Writers of csv double the quotes in a cell; a sentence has no spaces around it.
CELLS = st.lists(
  st.sampled_from(["a", '"', "b\u2028ü", 'say "no"', "two\nlines"]), min_size=1
)
CELLS = CELLS.map(lambda parts: f"x{' '.join(parts)}x")


@settings(max_examples=30)
@given(st.lists(st.tuples(CELLS, CELLS), min_size=1), st.booleans())
def test_quotes_of_csv_writers_are_removed(tmp_path_factory, pairs, quotes_all):
  pairs = [('say "yes"', "ja"), *pairs]
  path = tmp_path_factory.mktemp("csv") / "a.tsv"
  quoting = csv.QUOTE_ALL if quotes_all else csv.QUOTE_MINIMAL
  with open(path, "w", encoding="utf-8", newline="") as file:
    csv.writer(file, dialect="excel-tab", quoting=quoting).writerows(pairs)
  corpus = load_pairs(train=str(path))
  wanted = [tuple(cell.replace("\n", " ") for cell in pair) for pair in pairs]
  assert corpus.splits["train"] == wanted
  (note,) = corpus.notes
  assert note == f"{path} is read as csv: the quotes around its cells are removed"


@pytest.mark.parametrize(
  "line",
  [
    '"Hello."\t"Hallo."',  # quotes of the text itself: other lines have none
    '"Hello," he said.\t"Hallo", sagte er.',
    'He said: ""Hello""\t"Hallo"',
    '"Hello\tHallo"',
    '2" and 3"\t"2"" und ""3"',
  ],
)
def test_other_quotes_stay(tmp_path, line):
  table = write_table(tmp_path / "a", "one, two\teins, zwei", line)
  corpus = load_pairs(train=table)
  assert corpus.splits["train"][1] == tuple(line.split("\t"))
  assert corpus.notes == ()


def test_raw_lines_of_scan_are_pairs(tmp_path):
  table = write_table(tmp_path / "a", "IN: run twice OUT: I_RUN I_RUN", "IN: run")
  assert refusal(load_pairs, train=table).startswith(f"1 column in {table}, line 2")
  assert read_pairs(f"{write_table(tmp_path / 'b', 'IN: run OUT: I_RUN')}")[0] == [
    ("run", "I_RUN")
  ]


PACKED = gzip.compress(b"one\ttwo\n" * 9, mtime=0)
BZIPPED = bz2.compress(b"one\ttwo\n" * 9)


@pytest.mark.parametrize(
  "content, message",
  [
    (PACKED[:-6], "damaged compressed file {a}"),
    (BZIPPED[:20] + b"x" * 9, "damaged compressed file {a}"),
    (b"PK\x03\x04 and so on", "{a} is a zip archive: unpack it"),
    (b"one\teins\n\neins\n", "1 column in {a}, line 3: want 2"),
    (b"one,eins\n", "line 1: want 2 or more, with tabs, not commas,"),
    (b"\n\n", "no pairs in train: every line of {a} has an empty side"),
  ],
)
def test_a_wrong_file_is_named_in_one_line(tmp_path, content, message):
  path = tmp_path / "a.csv"
  path.write_bytes(content)
  assert message.format(a=path) in refusal(load_pairs, train=str(path))


def test_wrong_files_are_named_in_one_line(tmp_path):
  three = write(tmp_path / "3", b"1\n2\r\nK\xf6ln\n")
  two = write(tmp_path / "2", b"1\n2\n")
  refused = refusal(load_pairs, train=f"{three},{two}")
  assert f"invalid UTF-8 in {three}, line 3" in refused
  refused = refusal(load_pairs, train=f"{two},{write(tmp_path / '1', b'1')}")
  assert f"{two} has 2 lines and {tmp_path}/1 has 1" in refused
  assert f"no file {two}.gone" in refusal(load_pairs, train=f"{two},{two}.gone")
