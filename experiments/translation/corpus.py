"""Reads sentence pairs from several sources, and normalises them as Moses does."""

import csv
import dataclasses
import functools
import gzip
import hashlib
import io
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments.data.upstream import Corpus, Upstream
from experiments.errors import InputError
from experiments.files import read_content, to_path

# Languages that each source has, as source-target; () allows any.
_FOUR = ("en-de", "de-en", "en-fr", "fr-en")
LANGUAGES = dict(embedded=("en-de",), multi30k=_FOUR, scan=(), wmt14=_FOUR, pairs=())
_EMBEDDED = pathlib.Path(__file__).with_name("embedded")
_READ_AHEAD = 4096
_NAMED_LINES = 5  # a note names at most this many of the skipped lines


@dataclasses.dataclass(frozen=True, eq=False)
class LazyPairs(Sequence):
  """Applies a function to each item of a sequence, every time the item is read.

  It is for data sets that do not fit into memory. Iteration reads in bulk if `items`
  has `__getitems__`, as data sources of TFDS do. This is several times faster.
  """

  items: Sequence[Any]
  function: Callable[[Any], Any]

  def __len__(self) -> int:
    return len(self.items)

  def __getitem__(self, index: int) -> Any:
    return self.function(self.items[index])

  def __iter__(self) -> Iterator[Any]:
    if not hasattr(self.items, "__getitems__"):
      yield from map(self.function, self.items)
      return
    indices = range(len(self))
    for start in indices[::_READ_AHEAD]:
      items = self.items.__getitems__(indices[start : start + _READ_AHEAD])
      yield from map(self.function, items)


def load_embedded(train_size: int = 20_000) -> Corpus:
  """Reads the small English-German corpus of this package: see embedded/README.md.

  Sentences have 3 to 30 words, or 31 to 60 in the split `long`. No sentence of either
  language occurs twice. `train` has the first `train_size` pairs.
  """
  splits = {}
  for split in ("train", "valid", "test", "long"):
    splits[split], _ = _read_table(_EMBEDDED / f"{split}.tsv.xz")
  del splits["train"][train_size:]
  return Corpus(splits)


def load_pairs(train: str = "", valid: str = "", test: str = "") -> Corpus:
  """Reads a user's own sentence pairs from files.

  `train` and `valid` name files as `read_pairs` takes them. `test` may name several
  test sets; see `parse_test_files`. Raises InputError as these functions do, and if
  there are no training pairs.
  """
  if not train:
    raise InputError(
      "no training pairs: give --config.data.pairs.train=source_file,target_file"
    )
  tests = parse_test_files(test)
  splits = dict(train=train, valid=valid) | tests
  corpus = read_splits({split: files for split, files in splits.items() if files})
  return corpus._replace(test_files=tests)


def parse_test_files(text: str) -> dict[str, str]:
  """Parses test sets, "NAME=FILES;NAME=FILES"; returns files by name.

  The default name is "test". Raises InputError if a name is not a word, or if it is
  used twice or for another split.
  """
  files = {}
  for part in filter(None, text.split(";")):
    named = re.fullmatch(r"([^=/,]*)=(.*)", part)
    name, value = named.groups() if named else ("test", part)
    if name in files:
      raise InputError(f"config.data.pairs.test has {name} twice: give it another name")
    if name in ("train", "valid") or not re.fullmatch(r"[\w-]+", name):
      raise InputError(f"config.data.pairs.test.{name}: give the test set another name")
    files[name] = value
  return files


def read_splits(split_files: Mapping[str, str]) -> Corpus:
  """Reads the pairs of each split from its files; see `read_pairs`.

  Pairs with an empty side are skipped. The notes of the corpus count the skipped pairs,
  and give the line numbers of the first ones. Raises InputError as `read_pairs` does,
  and if a split has no other pairs.
  """
  splits, skipped, notes = {}, {}, {}  # notes without repetition
  for split, files in split_files.items():
    pairs, file_notes = read_pairs(files)
    notes |= dict.fromkeys(file_notes)
    empty, filled = [], []
    for index, pair in enumerate(pairs):
      if all(map(str.strip, pair)):
        filled.append(pair)
      else:
        empty.append(index)
    if not filled:
      raise InputError(f"no pairs in {split}: every line of {files} has an empty side")
    if empty:
      lines = [str(index + 1) for index in empty[:_NAMED_LINES]]
      if len(empty) > _NAMED_LINES:
        lines.append("...")
      some = f"{len(empty):,} (lines: {', '.join(lines)})"
      notes[f"pairs with an empty side skipped in {split}: {some}"] = None
    splits[split], skipped[split] = filled, tuple(empty)
  return Corpus(splits, tuple(notes), skipped)


def read_pairs(files: str) -> tuple[list[tuple[str, str]], list[str]]:
  """Reads all pairs of a split; returns the pairs, and notes on how files were read.

  Pairs with an empty side are included.

  `files` is one of three:
  - "source_file,target_file", where line i of one file translates line i of the other;
  - "file.tsv", a table of two columns with a tab between them;
  - "file.tsv:1,3", a table with more columns; columns 1 and 3 are read.

  Files are UTF-8, plain or compressed; lines end with \\n or \\r\\n. If a csv writer
  has put quotes around the cells of a table, they are removed. Instead of columns,
  lines may have SCAN's form, "IN: ... OUT: ...".

  Raises InputError if a file is missing, unreadable or not UTF-8, if two files differ
  in length, or if a line has too few or too many columns.
  """
  table = re.fullmatch(r"(.+):([1-9]\d*),([1-9]\d*)", files.strip())
  if table:
    name, *columns = table.groups()
    return _read_table(to_path(name.strip()), tuple(map(int, columns)))
  paths = [to_path(name.strip()) for name in files.split(",")]
  if len(paths) == 1:
    return _read_table(paths[0])
  if len(paths) > 2:
    raise InputError(
      f"{len(paths)} files in {files}: give source_file,target_file or file.tsv"
    )
  source, target = map(read_lines, paths)
  if len(source) != len(target):
    raise InputError(
      f"misaligned files: {paths[0]} has {len(source)} lines and {paths[1]} has "
      f"{len(target)}; line i of one must translate line i of the other"
    )
  return list(zip(source, target, strict=True)), []


def _read_table(
  path: pathlib.Path, columns: tuple[int, int] | None = None
) -> tuple[list[tuple[str, str]], list[str]]:
  """Reads two columns of a table; returns pairs and notes, as `read_pairs` does.

  `columns` are counted from 1. Without them, the table must have exactly two columns.
  """
  rows, notes = _read_rows(path)
  source, target = columns or (1, 2)  # counted from 1
  least = max(source, target)
  pairs = []
  for number, row in enumerate(rows, start=1):
    if not "".join(row).strip():
      row = [""] * least
    place = f"{len(row)} column{'s' * (len(row) > 1)} in {path}, line {number}"
    if columns is None and len(row) > 2:
      raise InputError(f"{place}: choose two, as {path}:1,2")
    if len(row) < least:
      raise InputError(
        f"{place}: want {least} or more, with tabs, not commas, between them, "
        "or give two files as source_file,target_file"
      )
    pairs.append((row[source - 1], row[target - 1]))
  return pairs, notes


def _read_rows(path: pathlib.Path) -> tuple[list[Sequence[str]], list[str]]:
  """Reads the cells of each line; returns them, and a note if quotes were removed."""
  lines = read_lines(path)
  text = "\n".join(lines)
  if text.startswith("IN: ") and "\t" not in lines[0]:
    return list(map(_split_scan, lines)), []
  if not _is_csv(text):
    return [line.split("\t") for line in lines], []
  rows = []
  for row in csv.reader(io.StringIO(text, newline="\n"), "excel-tab", strict=True):
    rows.append([re.sub(r"[\r\n]+", " ", cell) for cell in row])
  return rows, [f"{path} is read as csv: the quotes around its cells are removed"]


# A quoted cell of a csv writer, which doubles quotes inside; and a cell without quotes.
_QUOTED, _PLAIN = r'"(?:[^"]|"")*+"', r'[^"\t\r\n]*+'
_ANY_CELL = f"(?:{_QUOTED}|{_PLAIN})"
_ALL_QUOTED = re.compile(rf"{_QUOTED}(?:[\t\n]{_QUOTED})*+")
_SOME_QUOTED = re.compile(rf"{_ANY_CELL}(?:[\t\n]{_ANY_CELL})*+")


def _is_csv(text: str) -> bool:
  """Checks whether a csv writer has added the quotes in a table.

  Otherwise the quotes are part of the sentences. Some csv writers quote all cells.
  Others quote each cell that contains a quote, and double that quote.
  """
  pattern = _SOME_QUOTED if '""' in text else _ALL_QUOTED
  return bool(pattern.fullmatch(text))


def read_lines(path: pathlib.Path) -> list[str]:
  """Reads the lines of a UTF-8 file, plain or compressed, without line ends and BOM.

  Splits at \\n alone. str.splitlines would also split at U+2028, U+0085 or a lone \\r
  inside a sentence, and all pairs after it would be misaligned.

  Raises InputError if the file is missing, unreadable, or not UTF-8.
  """
  try:
    text = read_content(path).decode("utf-8-sig")
  except UnicodeDecodeError as error:
    line = error.object.count(b"\n", 0, error.start) + 1
    raise InputError(
      f"invalid UTF-8 in {path}, line {line}: convert the file to UTF-8"
    ) from None
  lines = text.removesuffix("\n").split("\n")
  return [line.removesuffix("\r") for line in lines] if text else []


def tokenize_moses(line: str, language: str) -> str:
  """Normalises and tokenises a line as the Perl scripts of Moses do.

  Koehn et al. 2007. Applies normalize-punctuation.perl and then tokenizer.perl, in
  sacremoses' versions and without XML escapes. For the English and German captions of
  Multi30k, the result equals upstream's "lc.norm.tok" files without their XML escapes.
  Processes about 7,000 lines per second.

  `language` is a two-letter code. As in Moses, unknown languages get English
  abbreviations.
  """
  normalise, tokenise = _moses(language)
  # With a newline, which some rules match, such as the one for '."' at a line's end.
  return tokenise(normalise(f"{line}\n"), return_str=True, escape=False)


@functools.cache
def _moses(language: str) -> tuple[Callable[[str], str], Callable[..., Any]]:
  from sacremoses import MosesPunctNormalizer, MosesTokenizer

  # perl_parity: otherwise sacremoses differs from the Perl script in ’ and French
  # quotes.
  normalizer = MosesPunctNormalizer(language, perl_parity=True)
  return normalizer.normalize, MosesTokenizer(language).tokenize


# Multi30k
# ----------------------------------------------------------------------------

# SHA-256 of the upstream files: the captions, and the published baseline's text.
_SUMS = """
train.en.gz d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f
train.de.gz 726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6
train.fr.gz 622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c
val.en.gz 14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28
val.de.gz f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a
val.fr.gz ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9
test_2016_flickr.en.gz 611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9
test_2016_flickr.de.gz 9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8
test_2016_flickr.fr.gz 6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90
train.en 0ffe3e3bac16e6aa33ef0dd6a7dca81587479b0d18dff0db2a92ac3f32b00c86
train.de b2c74def7ec129f7ea7023a51501c77174c377ef06c6ccc2f031adcfb5cfadbd
valid.en 193d0d18fef5d1bc9d1cddafa13a644de3c5d6a24b45ac44476dcc5e96bfac6e
valid.de eeb95680d6a06eafb13e3494eed9f9fa99783b892f4a3c72dd36e7ce2e000b68
test.2016.en 13b5fe3f92f78c54446d66afcaaa0a00a33ab653a8411f16812c9c5ca3795d6d
test.2016.de 375c20d50f4c486149a78dfcfb161a430a04ddabe2b7d150f0c7811dc455ac60
"""
_RAW = "https://raw.githubusercontent.com"
CAPTIONS = Upstream(
  "multi30k",
  "data/task1/raw of github.com/multi30k/dataset",
  f"{_RAW}/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw/",
  dict(line.split() for line in _SUMS.strip().split("\n")),
)
PREPARED = CAPTIONS._replace(
  where="data/multi30k-en-de of github.com/LividWo/Revisit-MMT",
  url=f"{_RAW}/LividWo/Revisit-MMT/dc368d0af8d60270b8f4aaa2f3ac58771c551da3"
  "/data/multi30k-en-de/",
)
_CAPTIONS = dict(train="train.{}.gz", valid="val.{}.gz", test="test_2016_flickr.{}.gz")
_PREPARED = dict(train="train.{}", valid="valid.{}", test="test.2016.{}")


def load_multi30k(
  languages: str = "en-de", path: str = "", prepared: bool = False
) -> Corpus:
  """Loads Multi30k's captions: 29,000 pairs in train, 1,014 in valid, 1,000 in test.

  They are cased, not tokenised, and in upstream's order (Elliott et al. 2016, 2017);
  test is test_2016_flickr. The files are downloaded (1.3 MB), unless the folder `path`
  holds them. Raises InputError as `Upstream.read` does.

  `prepared` loads the text of the published baseline instead (Wu et al. 2021,
  LividWo/Revisit-MMT, 4.5 MB; English and German). It is in lower case, normalised, in
  Moses tokens and joint BPE of 10,000 merges. Inside a word, subwords end in "@@".
  """
  upstream, names = (PREPARED, _PREPARED) if prepared else (CAPTIONS, _CAPTIONS)
  splits = {}
  for split, name in names.items():
    sides = []
    for language in languages.split("-"):
      content = upstream.read(name.format(language), path)
      text = content if prepared else gzip.decompress(content)
      # Not str.splitlines, which splits at U+2028 too.
      sides.append(text.decode().removesuffix("\n").split("\n"))
    splits[split] = list(zip(*sides, strict=True))
  return Corpus(splits)


# SCAN
# ----------------------------------------------------------------------------

SCAN = Upstream(
  "scan",
  "length_split of github.com/brendenlake/SCAN",
  f"{_RAW}/brendenlake/SCAN/c4b756cbc010d75c912f16c42c8f15dc6b7e6c8f/length_split/",
  {
    "tasks_train_length.txt": (
      "b034212dc7cf87ce62f3a067dd6ad49c4d5cd18d51d615d13825516bcb1ebbc2"
    ),
    "tasks_test_length.txt": (
      "0760752ed34a75116ae11dcc1ee17526b7500060da1366540730fa24894d7db3"
    ),
  },
)
_SCAN_HELD_OUT = 1000


def load_scan(path: str = "") -> Corpus:
  """Loads the length split of SCAN (Lake and Baroni 2018): commands and their actions.

  Training outputs have at most 22 actions. The outputs of `test` have 24 to 48. Two
  more splits are taken from upstream's 16,990 training pairs: `valid` and the test set
  `within`, with 1,000 pairs each. Pairs are in random order, so the first pairs of a
  split are a sample of it. The files are downloaded (4 MB), unless the folder `path`
  holds them. Raises InputError as `Upstream.read` does.
  """

  pairs = _read_scan("tasks_train_length.txt", path)
  n = _SCAN_HELD_OUT
  splits = dict(train=pairs[2 * n :], valid=pairs[:n], within=pairs[n : 2 * n])
  splits["test"] = _read_scan("tasks_test_length.txt", path)
  return Corpus(splits)


def _read_scan(name: str, path: str) -> list[tuple[str, ...]]:
  """Reads the pairs of a file; sorts them by their hashes, which is a random order."""
  lines = SCAN.read(name, path).decode().splitlines()
  lines.sort(key=lambda line: hashlib.sha256(line.encode()).digest())
  return list(map(_split_scan, lines))


def _split_scan(line: str) -> tuple[str, ...]:
  """Splits a line such as "IN: jump OUT: I_JUMP" into command and actions."""
  return tuple(line.removeprefix("IN: ").split(" OUT: "))
