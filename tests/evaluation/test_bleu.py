"""BLEU equals hand computations and the original scripts, and has its properties."""

import importlib

import numpy as np
import pytest
from faults import refusal
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu import BLEU

from experiments.evaluation.bleu import (
  check_tokenizer,
  corpus_bleu,
  corpus_chrf,
  join_subwords,
  paper_bleu,
  sentence_statistics,
)

HYPOTHESES = [
  "Der Hund läuft über saftig-grünes Gras vor einem weißen Zaun.",
  '"Schreib mir z.B. eine E-Mail", sagte er am 3. Mai.',
  "Zwei Männer sitzen auf einer Bank und reden miteinander.",
]
REFERENCES = [
  "Ein Hund läuft über sattgrünes Gras vor einem weißen Zaun.",
  '"Schreib mir z.B. eine E-Mail-Adresse", sagte sie am 3. Mai.',
  "Zwei ältere Männer sitzen auf einer Bank und reden miteinander.",
]


def test_paper_bleu_is_that_of_the_original_scripts():
  score = paper_bleu(HYPOTHESES, REFERENCES, "de").value
  assert score == pytest.approx(65.83, abs=0.005)


def test_tokenised_text_causes_no_warning(caplog):
  hypotheses, references = ["Ein Hund schläft ."] * 200, ["Der Hund schläft ."] * 200
  corpus_bleu(hypotheses, references)
  corpus_chrf(hypotheses, references)
  paper_bleu(hypotheses, references, "de")
  assert not caplog.records


def test_tokens_are_not_tokenised_again():
  hypotheses, references = ["Ein Hund schläft tief."], ["Ein Hund schläft tief ."]
  assert paper_bleu(hypotheses, references, "de").value == pytest.approx(100.0)
  assert paper_bleu(hypotheses, references, "de", tokenized=True).value < 90.0


@pytest.mark.parametrize(
  "options", [dict(), dict(tokenize="none"), dict(lowercase=True)]
)
@pytest.mark.parametrize("chosen", [[0, 1, 2], [1], [2, 0, 0]])
def test_sums_of_statistics_determine_the_bleu_of_any_selection(options, chosen):
  hypotheses = [HYPOTHESES[i] for i in chosen]
  references = [REFERENCES[i] for i in chosen]
  rows = sentence_statistics(HYPOTHESES, REFERENCES, **options)[chosen]
  totals = [int(np.maximum(rows[:, 0] - n, 0).sum()) for n in range(4)]
  sys_len, ref_len, *correct, _ = rows.sum(axis=0).tolist()
  score = BLEU().compute_bleu(correct, totals, sys_len, ref_len).score
  assert score == corpus_bleu(hypotheses, references, **options).value


@pytest.mark.parametrize("language", ["ja", "ko"])
def test_packages_for_words_of_a_language_are_named(language, monkeypatch):
  name = f"sacrebleu.tokenizers.tokenizer_{language}_mecab"
  monkeypatch.setattr(importlib.import_module(name), "MeCab", None)
  refused = refusal(check_tokenizer, f"{language}-mecab")
  needs = f"tokenize={language}-mecab needs more packages"
  assert refused.endswith(f"{needs}: pip install -e '.[{language}]'")


def test_statistics_of_empty_and_short_sentences():
  empty, short = sentence_statistics(["", "a b"], ["a", "a b c"]).tolist()
  assert empty == [0, 1, 0, 0, 0, 0, 0]
  assert short == [2, 3, 2, 1, 0, 0, 0]
  assert sentence_statistics([], []).shape == (0, 7)


@given(
  words=st.lists(st.lists(st.text("aü@-.|", min_size=1), min_size=1)),
  mark=st.sampled_from(["@@", "|", "\\1", "_"]),
)
def test_joining_inverts_splitting(words, mark):
  parts = [[part for part in word if not part.endswith(mark)] for word in words]
  words = [word or ["a"] for word in parts]
  line = " ".join(f"{mark} ".join(word) for word in words)
  assert join_subwords(line, mark) == " ".join(map("".join, words))
  assert join_subwords(line, "") == line
