"""Intervals equal scipy's."""

from experiments.evaluation.tables import student_interval


def test_welch_of_values_without_any_spread():
  assert student_interval([2.0, 2.0], [1.0, 1.0]) == (1.0, 0.0)
