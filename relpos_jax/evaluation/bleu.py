"""BLEU twice: sacreBLEU, which others can repeat, and the tokenised BLEU of the paper."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import sacrebleu
import sacremoses

from relpos_jax.typing import Float, Int


class Score(NamedTuple):
  """A BLEU score from 0 to 100, and the signature that says how it was computed."""

  value: float
  signature: str


def corpus_bleu(
  hypotheses: Sequence[str],
  references: Sequence[str],
  *,
  tokenize: str = "13a",
  lowercase: bool = False,
  subword_mark: str = "",
) -> Score:
  """sacreBLEU (Post 2018) of a corpus against one reference a sentence.

  Args:
    hypotheses: plain text, a sentence each.
    references: as many, in the same order.
    tokenize: sacreBLEU's tokeniser; "none" for text that is tokenised already.
    lowercase: compares lower-cased text.
    subword_mark: what the text's subwords end in; `join_subwords` joins them first. The signature
      is that of the joined text.

  Raises:
    ValueError: different numbers of hypotheses and references, or none.

  >>> score = corpus_bleu(["Ein Hund schläft."], ["Der Hund schläft."])
  >>> f"{score.value:.1f}"
  '59.5'
  >>> score.signature.split("|version")[0]
  'nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp'
  """
  metric = sacrebleu.BLEU(lowercase=lowercase, tokenize=tokenize, force=True)
  return _score(metric, *_joined(hypotheses, references, subword_mark))


def paper_bleu(
  hypotheses: Sequence[str],
  references: Sequence[str],
  language: str,
  *,
  tokenized: bool = False,
  subword_mark: str = "",
) -> Score:
  """The paper's BLEU: Moses tokens, hyphens split, cased, not smoothed, as multi-bleu.perl counts.

  It repeats get_ende_bleu.sh of tensor2tensor. Splitting compounds lifts the score a little, so
  compare it with that of the paper only, never with sacreBLEU.

  Args:
    hypotheses: plain text, a sentence each.
    references: as many, in the same order.
    language: whose Moses rules hold, such as "de".
    tokenized: the text consists of Moses tokens already: only hyphens are split.
    subword_mark: as in `corpus_bleu`.

  Raises:
    ValueError: different numbers of hypotheses and references, or none.

  >>> score = paper_bleu(["Der saftig-grüne Rasen !"], ["Der saftig-grüne Rasen!"], "de")
  >>> f"{score.value:.1f}"
  '100.0'
  >>> score.signature.split("|version")[0]
  'nrefs:1|case:mixed|eff:no|tok:moses-de+hyphens|smooth:none'
  """
  moses = sacremoses.MosesTokenizer(language)

  def tokens(line: str) -> str:
    # XML escapes would only rename tokens one to one, which BLEU does not see.
    line = line if tokenized else str(moses.tokenize(line, return_str=True, escape=False))
    return split_hyphens(line)

  metric = sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True)
  texts = _joined(hypotheses, references, subword_mark)
  value, signature = _score(metric, *(list(map(tokens, lines)) for lines in texts))
  return Score(value, signature.replace("tok:none", f"tok:moses-{language}+hyphens"))


def sentence_statistics(
  hypotheses: Sequence[str],
  references: Sequence[str],
  *,
  tokenize: str = "13a",
  lowercase: bool = False,
  subword_mark: str = "",
) -> Int[np.ndarray, "sentences 6"]:
  """What sacreBLEU counts in each sentence: tokens, the reference's, and matching 1- to 4-grams.

  Their sums over any selection of sentences give its BLEU (`bleu_of_counts`): of all
  of them that of `corpus_bleu`. The n-grams of a hypothesis of L tokens are max(0, L - n + 1).

  Raises:
    ValueError: different numbers of hypotheses and references.

  >>> sentence_statistics(["Ein Hund schläft."], ["Der Hund schläft."])
  array([[4, 4, 3, 2, 1, 0]])
  """
  # The effective order concerns the score alone, and without it sacreBLEU advises to use it.
  metric = sacrebleu.BLEU(lowercase=lowercase, tokenize=tokenize, force=True, effective_order=True)
  scores = [
    metric.sentence_score(hypothesis, [reference])
    for hypothesis, reference in zip(*_joined(hypotheses, references, subword_mark), strict=True)
  ]
  rows = [[score.sys_len, score.ref_len, *score.counts] for score in scores]
  return np.array(rows, int).reshape(-1, 6)


def join_subwords(line: str, mark: str) -> str:
  """The words of a line in subwords that end in `mark` where their word goes on.

  Sennrich et al. 2016 mark them "@@". An empty mark leaves the line as it is.

  >>> join_subwords("ein anst@@ arr@@ t@@ er hund@@", "@@")
  'ein anstarrter hund'
  """
  return re.sub(rf"{re.escape(mark)}(?: |\Z)", "", line) if mark else line


def split_hyphens(line: str) -> str:
  """Splits compounds as the field did when the paper was written.

  >>> split_hyphens("ein E-Mail-Konto - und ein 9-zu-5-Tag")
  'ein E ##AT##-##AT## Mail ##AT##-##AT## Konto - und ein 9 ##AT##-##AT## zu ##AT##-##AT## 5-Tag'
  """
  return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)


def sentence_counts(statistics: Int[np.ndarray, "sentences 6"]) -> Int[np.ndarray, "sentences 10"]:
  """`sentence_statistics`, and beside them how many 1- to 4-grams each translation has.

  >>> sentence_counts(np.array([[3, 4, 2, 1, 0, 0]])).tolist()
  [[3, 4, 2, 1, 0, 0, 3, 2, 1, 0]]
  """
  totals = np.maximum(statistics[:, :1] - np.arange(4), 0)
  return np.concatenate([statistics, totals], axis=1)


def bleu_of_counts(counts: Int[np.ndarray, "*B 10"]) -> Float[np.ndarray, "*B"]:
  """sacreBLEU, smoothed as `corpus_bleu` is, of sums of `sentence_counts`.

  >>> float(bleu_of_counts(np.array([5, 5, 5, 4, 3, 2, 5, 4, 3, 2])).round())
  100.0
  """
  flat = counts.reshape(-1, 10).tolist()
  scores = [sacrebleu.BLEU.compute_bleu(c[2:6], c[6:], c[0], c[1], "exp").score for c in flat]
  return np.array(scores).reshape(counts.shape[:-1])


def _joined(hypotheses, references, mark: str) -> tuple[list[str], list[str]]:
  hypotheses, references = (
    [join_subwords(line, mark) for line in x] for x in (hypotheses, references)
  )
  return hypotheses, references


def _score(metric: sacrebleu.BLEU, hypotheses, references) -> Score:
  if len(hypotheses) != len(references) or len(references) == 0:
    raise ValueError(
      f"{len(hypotheses)} hypotheses and {len(references)} references: give as many, and some"
    )
  value = metric.corpus_score(hypotheses, [references]).score
  return Score(value, metric.get_signature().format())
