"""Confidence intervals over seeds, and the paired bootstrap over sentences."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.evaluation.bleu import bleu_of_counts
from relpos_jax.typing import Float, Int

_Values = Sequence[float] | Float[np.ndarray, "_"]


class Interval(NamedTuple):
  """A mean and half the width of its 95% confidence interval; None for a single value."""

  mean: float
  half_width: float | None


class Scores(NamedTuple):
  """BLEU of one system: of each seed; and of each bootstrap sample, averaged over seeds."""

  seeds: Float[np.ndarray, "seeds"]
  samples: Float[np.ndarray, "samples"]


class Comparison(NamedTuple):
  """The difference between two systems, and its p-value under the paired bootstrap."""

  difference: Interval
  p_value: float

  def is_clear(self) -> bool:
    """Returns whether the 95% interval over seeds excludes zero and the p-value is below 5%."""
    mean, half_width = self.difference
    return half_width is not None and abs(mean) > half_width and self.p_value < 0.05


def student_interval(values: _Values, *minus: _Values) -> Interval:
  """Computes the mean of independent values and its 95% interval by Student's t.

  With further values it is the difference of the means, and its interval by Welch's t.

  >>> mean, half_width = student_interval([1.0, 2.0, 3.0])
  >>> f"{mean:.1f} ± {half_width:.3f}"
  '2.0 ± 2.484'
  >>> student_interval([5.0, 5.0], [2.0])
  Interval(mean=3.0, half_width=None)
  """
  from scipy.special import stdtrit

  mean = float(np.mean(values) - sum(map(np.mean, minus)))
  sizes = [len(of) for of in (values, *minus)]
  if min(sizes) < 2:
    return Interval(mean, None)
  squares = [np.var(of, ddof=1) / len(of) for of in (values, *minus)]  # of the standard errors
  if not (total := sum(squares)):
    return Interval(mean, 0.0)
  freedom = total**2 / sum(x**2 / (n - 1) for x, n in zip(squares, sizes, strict=True))
  return Interval(mean, float(stdtrit(freedom, (1 + 0.95) / 2) * np.sqrt(total)))


def draw_sentences(
  num_sentences: int, num_samples: int = 1000
) -> Int[np.ndarray, "samples sentences"]:
  """Draws bootstrap samples of sentences as sacreBLEU does; returns the counts of each sentence."""
  drawn = np.random.default_rng(12345).choice(num_sentences, (num_samples, num_sentences))
  drawn += num_sentences * np.arange(num_samples)[:, None]
  return np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)


def score_seeds(
  counts: Int[np.ndarray, "seeds sentences 10"], draws: Int[np.ndarray, "samples sentences"]
) -> Scores:
  """Computes the scores of a system from `sentence_counts` of each seed and `draw_sentences`."""
  # float64 uses BLAS, and its sums of counts are exact.
  sums = np.einsum("sn,knc->ksc", draws.astype(float), counts.astype(float), optimize=True)
  return Scores(
    bleu_of_counts(counts.sum(axis=1)), bleu_of_counts(np.rint(sums).astype(int)).mean(axis=0)
  )


def compare_scores(first: Scores, second: Scores) -> Comparison:
  """Compares two systems that were scored on the same draws of the same sentences.

  The p-value is that of the paired bootstrap (Koehn 2004), as sacreBLEU computes it.

  >>> first = Scores(np.array([2.5]), np.array([2.0, 3.0, 5.0]))
  >>> compare_scores(first, Scores(np.array([1.0]), np.array([1.0, 1.0, 1.0])))
  Comparison(difference=Interval(mean=1.5, half_width=None), p_value=0.5)
  """
  difference = student_interval(first.seeds, second.seeds)
  sampled = np.abs(first.samples - second.samples)
  exceeding = np.sum(sampled - sampled.mean() > abs(difference.mean))
  return Comparison(difference, (int(exceeding) + 1) / (len(sampled) + 1))
