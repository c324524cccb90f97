"""Sentence pairs by split, from one of four sources, and their normalisation as by Moses."""

import dataclasses
import functools
import importlib
import lzma
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sacremoses import MosesPunctNormalizer, MosesTokenizer

from relpos_jax.data.builders import LazyPairs
from relpos_jax.errors import InputError

# The languages of each source, source-target; any for "pairs".
LANGUAGES = {
  "embedded": ("en-de",),
  "multi30k": ("en-de", "de-en", "en-fr", "fr-en"),
  "wmt14": ("en-de", "de-en", "en-fr", "fr-en"),
  "pairs": (),
}
_EMBEDDED = pathlib.Path(__file__).with_name("embedded")


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Sentence pairs (source, target) by split: train, valid, test and, for some sources, long.

  A split is any random-access sequence, in memory or read from disk item by item. `notes` are lines
  for the log about pairs that were skipped.
  """

  splits: Mapping[str, Sequence[tuple[str, str]]]
  notes: tuple[str, ...] = ()


def load_corpus(source: str, **options: Any) -> Corpus:
  """Loads the sentence pairs of a source, which is "embedded", "multi30k", "wmt14" or "pairs".

  `options` are the keyword arguments of `load_embedded`, or of `load` in the source's module.

  Raises:
    InputError: the data are missing or wrong.

  >>> {name: len(pairs) for name, pairs in load_corpus("embedded", train_size=10).splits.items()}
  {'train': 10, 'valid': 500, 'test': 500, 'long': 200}
  """
  if source == "embedded":
    return load_embedded(**options)
  return importlib.import_module(f"relpos_jax.translation.{source}").load(**options)


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
