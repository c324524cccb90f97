"""Comparisons of trees of arrays."""

import jax
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal


def assert_close(actual, wanted, message="", *, rtol=0, atol=1e-10):
  """Checks every array of a tree, by default in float64."""

  def compare(x, y):
    assert_allclose(x, y, rtol, atol, err_msg=str(message))

  jax.tree.map(compare, actual, wanted)


def assert_same(actual, wanted):
  """Checks that every number of a tree has the same bits."""
  jax.tree.map(assert_array_equal, actual, wanted)


def root_mean_square(x):
  return float(np.sqrt(np.mean(np.square(x))))


def relative_errors(actual, wanted, least=0.0):
  """Returns the root-mean-square error of each array over its numbers', by name."""

  def error(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y)
    return root_mean_square(x - y) / max(root_mean_square(y), least)

  errors = {}
  for path, x in jax.tree.leaves_with_path(jax.tree.map(error, actual, wanted)):
    errors[jax.tree_util.keystr(path, simple=True, separator=".")] = x
  return errors
