"""Computes four scores: sacreBLEU, the BLEU of the paper, chrF and exact matches."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.errors import InputError
from relpos_jax.typing import Int

_Lines = Sequence[str]


class Score(NamedTuple):
  """Holds a score from 0 to 100, and a signature that says how it was computed."""

  value: float
  signature: str


def corpus_bleu(
  hypotheses: _Lines,
  references: _Lines,
  *,
  tokenize: str = "13a",
  lowercase: bool = False,
) -> Score:
  """Computes sacreBLEU (Post 2018) of sentences with one reference each.

  `tokenize` names one of sacreBLEU's tokenisers; "none" is for tokenised text.
  `lowercase` compares lower-cased text. Raises ValueError if the numbers of hypotheses
  and references differ or are zero.

  >>> score = corpus_bleu(["Ein Hund schläft."], ["Der Hund schläft."])
  >>> f"{score.value:.1f}"
  '59.5'
  >>> score.signature.split("|version")[0]
  'nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp'
  """
  return _score(_metric(lowercase=lowercase, tokenize=tokenize), hypotheses, references)


def corpus_chrf(
  hypotheses: _Lines, references: _Lines, *, lowercase: bool = False
) -> Score:
  """Computes chrF (Popović 2015) from character n-grams; it also suits single words."""
  from sacrebleu import CHRF

  return _score(CHRF(lowercase=lowercase), hypotheses, references)


def paper_bleu(
  hypotheses: _Lines, references: _Lines, language: str, *, tokenized: bool = False
) -> Score:
  """Computes BLEU as Vaswani et al. 2017 did, only for comparison with their paper.

  The text is divided into Moses tokens, and these are split at hyphens. Case matters,
  and nothing is smoothed. The result equals that of tensor2tensor's get_ende_bleu.sh
  with multi-bleu.perl. Splitting at hyphens raises the score slightly, so never compare
  it with sacreBLEU.

  `language`, such as "de", chooses the Moses tokeniser. `tokenized` says that the text
  is already in Moses tokens.

  >>> hypothesis, reference = "Der saftig-grüne Rasen !", "Der saftig-grüne Rasen!"
  >>> score = paper_bleu([hypothesis], [reference], "de")
  >>> score.signature.split("|version")[0]
  'nrefs:1|case:mixed|eff:no|tok:moses-de+hyphens|smooth:none'
  """
  from sacremoses import MosesTokenizer  # here, because translating does not need it

  moses = MosesTokenizer(language)

  def tokens(line: str) -> str:
    if not tokenized:
      # BLEU needs no escapes: they rename tokens one to one.
      line = moses.tokenize(line, return_str=True, escape=False)
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)

  metric = _metric(tokenize="none", smooth_method="none")
  hypotheses = [tokens(line) for line in hypotheses]
  references = [tokens(line) for line in references]
  value, signature = _score(metric, hypotheses, references)
  return Score(value, signature.replace("tok:none", f"tok:moses-{language}+hyphens"))


def sentence_statistics(
  hypotheses: _Lines,
  references: _Lines,
  *,
  tokenize: str = "13a",
  lowercase: bool = False,
) -> Int[np.ndarray, "sentences 7"]:
  """Counts, for each sentence, the tokens and n-grams that BLEU is computed from.

  The columns are the number of tokens in the sentence, the number in its reference, and
  the numbers of matching 1- to 4-grams. The last column is 1 if the sentence equals its
  reference up to spaces. The sums over a set of sentences determine the BLEU of the
  set: see `sacrebleu.BLEU.compute_bleu`.
  """
  # effective_order changes no counts, but silences a warning.
  metric = _metric(lowercase=lowercase, tokenize=tokenize, effective_order=True)
  rows = []
  for hypothesis, reference in zip(hypotheses, references, strict=True):
    score = metric.sentence_score(hypothesis, [reference])
    if lowercase:
      hypothesis, reference = hypothesis.lower(), reference.lower()
    is_exact = hypothesis.split() == reference.split()
    rows.append([score.sys_len, score.ref_len, *score.counts, is_exact])
  return np.array(rows, int).reshape(-1, 7)


def join_subwords(line: str, mark: str) -> str:
  """Joins the subwords of a line into words.

  A subword ends in `mark` if its word goes on. An empty mark changes nothing.

  >>> join_subwords("ein Ras@@ en@@ mäher", "@@")
  'ein Rasenmäher'
  """
  return re.sub(rf"{re.escape(mark)}(?: |\Z)", "", line) if mark else line


def check_tokenizer(tokenize: str) -> None:
  """Raises InputError if sacreBLEU lacks the packages of a tokeniser."""
  _metric(tokenize=tokenize)


def _metric(tokenize: str, **options) -> Any:
  from sacrebleu import BLEU

  try:
    return BLEU(force=True, tokenize=tokenize, **options)
  except RuntimeError:  # ja-mecab and ko-mecab need packages
    extra = tokenize.partition("-")[0]
    raise InputError(
      f"config.evaluation.tokenize={tokenize} needs more packages: "
      f"pip install -e '.[{extra}]'"
    ) from None


def _score(metric: Any, hypotheses, references) -> Score:
  if len(hypotheses) != len(references) or len(references) == 0:
    raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references")
  value = metric.corpus_score(hypotheses, [references]).score
  return Score(value, metric.get_signature().format())
