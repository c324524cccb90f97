"""Intervals equal scipy's."""

import pytest
import scipy.stats

from experiments.evaluation.tables import student_interval


def test_welch_is_scipys():
  first, second = [1.0, 2.0, 4.0], [3.0, 3.5, 3.2, 9.0]
  test = scipy.stats.ttest_ind(first, second, equal_var=False)
  low, high = test.confidence_interval(0.95)
  mean, half_width = student_interval(first, second)
  assert (mean - half_width, mean + half_width) == pytest.approx((low, high))


def test_welch_of_values_without_any_spread():
  assert student_interval([2.0, 2.0], [1.0, 1.0]) == (1.0, 0.0)
