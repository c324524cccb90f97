"""Costs: pairs alternate, ratios are of neighbours, memory is the compiler's."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax.evaluation import cost
from relpos_jax.evaluation.cost import (
  compare,
  compile_program,
  ratio_interval,
  ratio_quartiles,
  take_turns,
  with_gradients,
)


@pytest.fixture
def calls(monkeypatch):
  """Names of what ran; the n-th run takes n seconds."""
  calls = []

  def run_time(function):
    calls.append(function())
    return float(len(calls))

  monkeypatch.setattr(cost, "run_time", run_time)
  return calls


def test_pairs_run_side_by_side_and_take_turns_to_be_first(calls):
  ticks = []
  functions = {name: lambda name=name: name for name in "abc"}
  times = compare(functions, [("a", "c"), ("b", "c")], 2, ticks.append)
  assert "".join(calls) == "cacb" + "acbc"
  assert times["a", "c"] == ([2.0, 5.0], [1.0, 6.0])
  assert times["b", "c"] == ([4.0, 7.0], [3.0, 8.0])
  assert sum(ticks) == sum(range(1, 9)) and len(ticks) == 4


def test_in_turns_each_is_as_often_first_and_as_often_before_its_neighbour(calls):
  seconds = take_turns({name: lambda name=name: name for name in "abc"}, 6)
  rounds = ["".join(calls[i : i + 3]) for i in range(0, 18, 3)]
  assert rounds == ["abc", "cba", "bca", "acb", "cab", "bac"]
  assert seconds["a"][:2] == [1.0, 6.0] and all(len(of) == 6 for of in seconds.values())


def test_an_interval_holds_the_median_and_shrinks_with_the_spread():
  random = np.random.default_rng(0)
  widths = []
  for spread in (0.2, 0.02):
    ratios = np.exp(spread * random.normal(size=60)).tolist()
    low, high = ratio_interval(ratios, 60 * [1.0])
    assert low < np.median(ratios) < high
    widths.append(high - low)
  assert widths[0] > 5 * widths[1]


class Late:
  """There a hundredth of a second after somebody asks for it."""

  is_there = False

  def block_until_ready(self):
    time.sleep(0.01)
    self.is_there = True


def test_a_run_is_waited_for():
  late = Late()
  assert cost.run_time(lambda: [late]) >= 0.01
  assert late.is_there


def test_ratios_are_of_neighbours_not_of_medians():
  drifting = np.array([1.0, 10.0, 100.0])
  assert ratio_quartiles(list(2 * drifting), list(drifting)) == (2.0, 2.0, 2.0)


def test_the_result_and_all_gradients_are_taken():
  x, y = jnp.arange(3.0), jnp.arange(3.0) + 5
  result, gradients = with_gradients(lambda x, y: x * y)(jnp.ones(3), x, y)
  np.testing.assert_array_equal(result, x * y)
  np.testing.assert_array_equal(gradients, [y, x])


def test_memory_is_that_of_what_is_neither_argument_nor_result():
  x = jax.ShapeDtypeStruct((256, 4), jnp.float32)
  weights = 4 * 256 * 256
  without, with_weights = (
    compile_program(function, x)
    for function in (lambda x: x + 1, lambda x: jax.nn.softmax(x @ x.T) @ x)
  )
  assert without.temporary_bytes < weights / 4 < weights <= with_weights.temporary_bytes
  assert without.bytes_needed >= 2 * 4 * 256 * 4


def test_a_program_computes_its_function():
  assert compile_program(lambda x: 2 * x, jnp.ones(3)).run(jnp.arange(3.0)).tolist() == [0, 2, 4]
