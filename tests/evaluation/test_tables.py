"""Statistics equal tables, scipy and sacreBLEU, and have their properties."""

import numpy as np
import pytest
import sacrebleu
import scipy.stats
from sacrebleu.significance import PairedTest

from experiments.evaluation.bleu import sentence_counts, sentence_statistics
from experiments.evaluation.tables import (
  Interval,
  compare_scores,
  draw_sentences,
  is_clear,
  score_seeds,
  student_interval,
)

WORDS = ("der", "die", "ein", "Hund", "Mann", "Kind", "sieht", "hört", "auf", "dem", "Platz", "und")


def make_texts(quality: float, seed: int, num_sentences: int = 60):
  """Returns translations that keep a share `quality` of the words, and their references."""
  rng = np.random.default_rng(0)
  references = [list(rng.choice(WORDS, rng.integers(1, 14))) for _ in range(num_sentences)]
  rng = np.random.default_rng(seed)
  kept = [[w if rng.random() < quality else "x" for w in words] for words in references]
  hypotheses = [words[: max(1, len(words) - rng.integers(3))] for words in kept]
  return [" ".join(words) for words in hypotheses], [" ".join(words) for words in references]


def counts_of(quality: float, seed: int):
  return sentence_counts(sentence_statistics(*make_texts(quality, seed), tokenize="none"))


class TestIntervals:
  def test_welch_is_scipys(self):
    first, second = [1.0, 2.0, 4.0], [3.0, 3.5, 3.2, 9.0]
    theirs = scipy.stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    mean, half_width = student_interval(first, second)
    assert (mean - half_width, mean + half_width) == pytest.approx((theirs.low, theirs.high))

  def test_welch_of_values_without_any_spread(self):
    assert student_interval([2.0, 2.0], [1.0, 1.0]) == (1.0, 0.0)


class TestPairedBootstrap:
  @pytest.mark.parametrize("quality", [0.5, 0.56, 0.7])
  def test_one_seed_equals_sacrebleus_test(self, quality):
    first, references = make_texts(quality, seed=1)
    second, _ = make_texts(0.55, seed=2)
    metric = dict(BLEU=sacrebleu.BLEU(tokenize="none"))
    test = PairedTest([("b", second), ("a", first)], metric, [references], "bs", n_samples=200)
    theirs = test()[1]["BLEU"][1]
    draws = draw_sentences(len(references), 200)
    a, b = (score_seeds(counts_of(*of)[None], draws) for of in ((quality, 1), (0.55, 2)))
    assert a.seeds[0] == pytest.approx(theirs.score)
    assert a.samples.mean() == pytest.approx(theirs.mean)
    assert compare_scores(a, b)[1] == pytest.approx(theirs.p_value)

  def test_seeds_are_averaged_sample_by_sample(self):
    counts, draws = np.stack([counts_of(0.5, 1), counts_of(0.9, 2)]), draw_sentences(60, 20)
    both = score_seeds(counts, draws)
    first, second = (score_seeds(one[None], draws) for one in counts)
    np.testing.assert_allclose(both.samples, (first.samples + second.samples) / 2)
    np.testing.assert_array_equal(both.seeds, [first.seeds[0], second.seeds[0]])


def test_a_clear_difference_passes_both_tests():
  clear = lambda p_value, *interval: is_clear(Interval(*interval), p_value)
  assert clear(0.01, 1.0, 0.5) and clear(0.01, -1.0, 0.5)
  assert not clear(0.01, 1.0, 1.5) and not clear(0.06, 1.0, 0.5)
  assert not clear(0.01, 1.0, None) and not clear(0.01, 0.0, 0.0)
