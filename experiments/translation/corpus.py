"""Sentence pairs by split, from one of four sources, and their normalisation as by Moses."""

import dataclasses
import functools
import lzma
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments.errors import InputError
from experiments.files import read_content

# The languages of each source, source-target; any for "pairs".
LANGUAGES = {
  "embedded": ("en-de",),
  "multi30k": ("en-de", "de-en", "en-fr", "fr-en"),
  "wmt14": ("en-de", "de-en", "en-fr", "fr-en"),
  "pairs": (),
}
_EMBEDDED = pathlib.Path(__file__).with_name("embedded")
_BOM = b"\xef\xbb\xbf"
_READ_AHEAD = 4096


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Sentence pairs (source, target) by split: train, valid, test and, for some sources, long.

  A split is any random-access sequence, in memory or read from disk item by item. `notes` are lines
  for the log about pairs that were skipped.
  """

  splits: Mapping[str, Sequence[tuple[str, str]]]
  notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class LazyPairs(Sequence):
  """A sequence of `function(item)`, computed each time an item is read.

  For data sets that do not fit into memory. Iteration and slices read in bulk if `items` has
  `__getitems__`, as data sources of TFDS do, which is several times faster.

  >>> pairs = LazyPairs(["Ja", "Nein"], lambda word: (word, word.lower()))
  >>> pairs[1], list(pairs)
  (('Nein', 'nein'), [('Ja', 'ja'), ('Nein', 'nein')])
  """

  items: Sequence[Any]
  function: Callable[[Any], Any]

  def __len__(self) -> int:
    return len(self.items)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.__getitems__(range(len(self))[index])
    return self.function(self.items[range(len(self))[index]])

  def __getitems__(self, indices: Sequence[int]) -> list[Any]:
    in_bulk = getattr(self.items, "__getitems__", None)
    items = in_bulk(list(indices)) if in_bulk else map(self.items.__getitem__, indices)
    return [self.function(item) for item in items]

  def __iter__(self) -> Iterator[Any]:
    for start in range(0, len(self), _READ_AHEAD):
      yield from self[start : start + _READ_AHEAD]


def load_embedded(train_size: int = 20_000) -> Corpus:
  """Reads the small English-German corpus of this package: see embedded/README.md.

  Sentences have 3 to 30 words, those of the split `long` 31 to 60. No sentence of either language
  occurs twice. `train_size` takes the first pairs of train.

  Raises:
    InputError: train_size is not from 1 to 20,000.
  """
  if not 1 <= train_size <= 20_000:
    raise InputError(f"train_size {train_size} for embedded: give a number from 1 to 20000")
  splits = {}
  for name in ("train", "valid", "test", "long"):
    text = lzma.decompress((_EMBEDDED / f"{name}.tsv.xz").read_bytes()).decode()
    rows = (line.split("\t") for line in text.removesuffix("\n").split("\n"))
    splits[name] = [(source, target) for source, target in rows]
  return Corpus(splits | dict(train=splits["train"][:train_size]))


def load_pairs(train: str = "", valid: str = "", test: str = "") -> Corpus:
  """Reads a user's own pairs; a split is "source_file,target_file" or "file.tsv", plain or gzip.

  Line i of one file translates line i of the other; a line of a TSV file is source, tab, target.
  Files are UTF-8; lines end with \\n or \\r\\n. Pairs with an empty side are skipped and counted in
  the notes.

  Raises:
    InputError: a file is missing, unreadable or not UTF-8, two files differ in length, a line does
      not have two columns, or a split has no pairs.

  >>> import pathlib, tempfile
  >>> folder = pathlib.Path(tempfile.mkdtemp())
  >>> _ = (folder / "train.en").write_text("a dog runs\\n\\nit rains\\n")
  >>> _ = (folder / "train.de").write_text("ein Hund rennt\\nnichts\\nes regnet\\n")
  >>> corpus = load_pairs(train=f"{folder}/train.en,{folder}/train.de")
  >>> corpus.splits["train"]
  [('a dog runs', 'ein Hund rennt'), ('it rains', 'es regnet')]
  >>> corpus.notes
  ('pairs with an empty side skipped in train: 1',)
  """
  if not train:
    raise InputError('no training pairs: give train="source_file,target_file" or train="file.tsv"')
  named = {"train": train, "valid": valid, "test": test}
  splits, notes = {}, []
  for split, files in named.items():
    if not files:
      continue
    pairs = _read_pairs(files)
    splits[split] = [pair for pair in pairs if all(map(str.strip, pair))]
    if not splits[split]:
      raise InputError(f"no pairs in {split}: every line of {files} has an empty side")
    if skipped := len(pairs) - len(splits[split]):
      notes.append(f"pairs with an empty side skipped in {split}: {skipped}")
  return Corpus(splits, tuple(notes))


def _read_pairs(files: str) -> list[tuple[str, str]]:
  """Reads all pairs of "source_file,target_file" or "file.tsv", also those with an empty side."""
  paths = [pathlib.Path(name.strip()).expanduser() for name in files.split(",")]
  if len(paths) > 2:
    raise InputError(f"{len(paths)} files in {files}: give source_file,target_file or file.tsv")
  sides = [read_lines(path) for path in paths]
  if len(paths) == 1:
    rows = [line.split("\t") if line.strip() else ["", ""] for line in sides[0]]
    for number, row in enumerate(rows, start=1):
      if len(row) != 2:
        raise InputError(
          f"{len(row)} columns in {paths[0]}, line {number}: give source, tab, target in every "
          "line, or two files as source_file,target_file"
        )
    return [(source, target) for source, target in rows]
  source, target = sides
  if len(source) != len(target):
    raise InputError(
      f"misaligned files: {paths[0]} has {len(source)} lines and {paths[1]} has {len(target)}; "
      "line i of one must translate line i of the other"
    )
  return list(zip(source, target, strict=True))


def read_lines(path: pathlib.Path) -> list[str]:
  """Reads the lines of a UTF-8 text file, plain or gzip, without line ends and byte order mark.

  Splits at \\n alone. str.splitlines would also split at U+2028, U+0085 or a lone \\r inside a
  sentence, which would shift all pairs after it.

  Raises:
    InputError: the file is missing, unreadable, or not UTF-8.
  """
  content = read_content(path).removeprefix(_BOM)
  try:
    text = content.decode()
  except UnicodeDecodeError as error:
    line = content.count(b"\n", 0, error.start) + 1
    raise InputError(f"invalid UTF-8 in {path}, line {line}: convert the file to UTF-8") from None
  lines = text.removesuffix("\n").split("\n")
  return [line.removesuffix("\r") for line in lines] if text else []


def normalize_lines(
  lines: Iterable[str], language: str, *, moses: bool = True, lowercase: bool = False
) -> list[str]:
  """Normalises and tokenises lines as the Perl scripts of Moses do (Koehn et al. 2007).

  Applies normalize-punctuation.perl, then tokenizer.perl, both by sacremoses and without XML
  escapes. For the English and German captions of Multi30k the result equals upstream's
  "lc.norm.tok" files with their XML escapes undone. Processes about 7,000 lines per second.

  Args:
    lines: the text.
    language: a two-letter code; unknown ones get English abbreviations, as in Moses.
    moses: False leaves punctuation and tokens as they are.
    lowercase: converts to lower case first.

  >>> normalize_lines(["„Halt!“, rief Dr. Weiß."], "de")
  ['" Halt ! " , rief Dr. Weiß .']
  >>> normalize_lines(["He doesn't (yet) run."], "en", lowercase=True)
  ["he doesn 't ( yet ) run ."]
  """
  cased = [line.lower() if lowercase else line for line in lines]
  if not moses:
    return cased
  normalise, tokenise = _moses(language)
  # Some rules of the Perl script match the newline, such as that for '."' at the end of a line.
  return [tokenise(normalise(line + "\n"), return_str=True, escape=False) for line in cased]


@functools.cache
def _moses(language: str) -> tuple[Callable[[str], str], Callable[..., Any]]:
  from sacremoses import MosesPunctNormalizer, MosesTokenizer

  # Without perl_parity, sacremoses treats ’ and French quotes differently from the Perl script.
  normalizer = MosesPunctNormalizer(language, perl_parity=True)
  return normalizer.normalize, MosesTokenizer(language).tokenize


def normalize_corpus(
  corpus: Corpus, languages: str, *, moses: bool = True, lowercase: bool = False
) -> Corpus:
  """Applies `normalize_lines` to both sides; `languages` is source-target, as "en-de".

  A split that is a list is normalised at once, any other when it is read.

  >>> corpus = Corpus({"train": [("It rains.", "Es regnet.")]})
  >>> normalize_corpus(corpus, "en-de", lowercase=True).splits["train"]
  [('it rains .', 'es regnet .')]
  """

  def normalize(pair: tuple[str, str]) -> tuple[str, str]:
    source, target = (
      normalize_lines([line], language, moses=moses, lowercase=lowercase)[0]
      for line, language in zip(pair, languages.split("-"), strict=True)
    )
    return source, target

  splits = {
    split: list(map(normalize, pairs)) if isinstance(pairs, list) else LazyPairs(pairs, normalize)
    for split, pairs in corpus.splits.items()
  }
  return Corpus(splits, corpus.notes)
