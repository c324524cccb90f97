"""Moses normalisation and tokenisation, as in the preprocessed data of the papers."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from sacremoses import MosesPunctNormalizer, MosesTokenizer

from relpos_jax.data.builders import LazyPairs
from relpos_jax.translation.corpus import Corpus


def normalize_lines(
  lines: Iterable[str], language: str, *, moses: bool = True, lowercase: bool = False
) -> list[str]:
  """Normalises and tokenises lines as the Perl scripts of Moses do.

  Applies normalize-punctuation.perl, then tokenizer.perl (Koehn et al. 2007), both by sacremoses
  and without XML escapes; tokens are separated by single spaces. For the English and German
  captions of Multi30k the result equals upstream's "lc.norm.tok" files with their XML escapes
  undone. Processes about 7,000 lines per second.

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
  normalise, tokenise = _scripts(language)
  # Some rules of the Perl script match the newline, such as that for '."' at the end of a line.
  return [tokenise(normalise(line + "\n")) for line in cased]


def normalize_corpus(
  corpus: Corpus, languages: str, *, moses: bool = True, lowercase: bool = False
) -> Corpus:
  """Applies `normalize_lines` to both sides; `languages` is source-target, as "en-de".

  A split that is a list is normalised at once, any other when it is read.

  >>> corpus = Corpus({"train": [("It rains.", "Es regnet.")]})
  >>> normalize_corpus(corpus, "en-de", lowercase=True).splits["train"]
  [('it rains .', 'es regnet .')]
  """
  source, target = languages.split("-")
  normalise = functools.partial(normalize_lines, moses=moses, lowercase=lowercase)
  normalised = functools.partial(_pair, normalise, (source, target))
  splits = {}
  for split, pairs in corpus.splits.items():
    lazy = LazyPairs(pairs, normalised)
    splits[split] = list(lazy) if isinstance(pairs, list) else lazy
  return Corpus(splits, corpus.notes)


def _pair(normalise, languages: tuple[str, str], pair: tuple[str, str]) -> tuple[str, str]:
  source, target = (
    normalise([side], language)[0] for side, language in zip(pair, languages, strict=True)
  )
  return source, target


@functools.cache
def _scripts(language: str) -> tuple[Callable[[str], str], Callable[..., Any]]:
  # Without perl_parity, sacremoses treats ’ and French quotes differently from the Perl script.
  normalizer = MosesPunctNormalizer(language, perl_parity=True)
  tokenizer = MosesTokenizer(language)
  return normalizer.normalize, functools.partial(tokenizer.tokenize, return_str=True, escape=False)
