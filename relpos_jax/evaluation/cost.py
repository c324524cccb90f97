"""What a computation costs: its time beside another's, and the memory its compiler sets aside."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

_SEED, _NUM_SAMPLES = 12345, 10_000  # of resampled rounds

Pair = tuple[str, str]


class Times(NamedTuple):
  """Seconds of one function, and of the function that ran right before or after each of them."""

  seconds: list[float]
  against_seconds: list[float]


def compare(
  functions: Mapping[str, Callable[[], Any]],
  pairs: Iterable[Pair],
  repetitions: int,
  tick: Callable[[float], None] = lambda seconds: None,
) -> dict[Pair, Times]:
  """Times functions in pairs, one pair after the other, again and again.

  A machine's speed drifts, so only runs that are neighbours in time are compared; the second of a
  pair goes first every other time. A pair of a function with itself shows the noise.

  Args:
    functions: by name; each returns what is to be waited for.
    pairs: names of two functions, the second one that to compare with.
    repetitions: of every pair.
    tick: called after each pair with the seconds that it took.

  >>> functions = dict(double=lambda: np.ones(9) * 2, square=lambda: np.ones(9) ** 2)
  >>> times = compare(functions, [("double", "square"), ("square", "square")], repetitions=4)
  >>> [len(seconds) for seconds in times["double", "square"]]
  [4, 4]
  """
  times = {pair: Times([], []) for pair in pairs}
  for repetition in range(repetitions):
    for pair, (seconds, against) in times.items():
      runs = [(seconds, pair[0]), (against, pair[1])]
      for list_of_seconds, name in runs if repetition % 2 else reversed(runs):
        list_of_seconds.append(run_time(functions[name]))
      tick(seconds[-1] + against[-1])
  return times


def take_turns(functions: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
  """Times each function once a round, and returns the seconds of each by name.

  Each is as often first as any other, and as often before as after its neighbour: of n functions,
  2 n rounds have n orders and their reverses. Only the runs of one round are to be compared.

  >>> seconds = take_turns(dict(double=lambda: np.ones(9) * 2, square=lambda: np.ones(9) ** 2), 4)
  >>> [len(of) for of in seconds.values()]
  [4, 4]
  """
  names = list(functions)
  seconds = {name: [] for name in names}
  for number in range(rounds):
    first = number // 2 % len(names)
    order = names[first:] + names[:first]
    for name in reversed(order) if number % 2 else order:
      seconds[name].append(run_time(functions[name]))
  return seconds


def run_time(function: Callable[[], Any]) -> float:
  """Seconds of one call, until all arrays that it returns are there."""
  start = time.perf_counter()
  jax.block_until_ready(function())
  return time.perf_counter() - start


def ratio_quartiles(
  seconds: Sequence[float], against_seconds: Sequence[float]
) -> tuple[float, float, float]:
  """Lower quartile, median and upper quartile of the ratios of neighbours.

  >>> ratio_quartiles([2.0, 2.0, 3.0], [1.0, 2.0, 1.0])
  (1.5, 2.0, 2.5)
  """
  low, median, high = np.quantile(np.divide(seconds, against_seconds), (0.25, 0.5, 0.75))
  return float(low), float(median), float(high)


def ratio_interval(
  seconds: Sequence[float], against_seconds: Sequence[float]
) -> tuple[float, float]:
  """The 95% interval of the median ratio: percentiles of the medians of resampled rounds.

  >>> ratio_interval([2.0] * 6, [1.0] * 6)
  (2.0, 2.0)
  """
  ratios = np.divide(seconds, against_seconds)
  samples = np.random.default_rng(_SEED).choice(ratios, (_NUM_SAMPLES, len(ratios)))
  low, high = np.quantile(np.median(samples, axis=1), (0.025, 0.975))
  return float(low), float(high)


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
  """The function that takes a cotangent of the result first, and gives result and gradients.

  Both, as training needs both: a compiler would leave out what only the result needs.

  >>> result, gradients = with_gradients(lambda x: x**2)(1.0, 3.0)
  >>> float(result), float(gradients[0])
  (9.0, 6.0)
  """

  def both(cotangent, *arguments):
    result, pull_back = jax.vjp(function, *arguments)
    return result, pull_back(cotangent)

  return both


class Program(NamedTuple):
  """A compiled function, and its compiler's account of memory.

  Attributes:
    run: takes the function's arguments.
    temporary_bytes: of what is neither argument nor result.
    bytes_needed: of all at once.
  """

  run: Callable[..., Any]
  temporary_bytes: int
  bytes_needed: int


def compile_program(function: Callable[..., Any], *arguments: Any) -> Program:
  """Compiles for these arguments, of which the shapes suffice; nothing runs.

  >>> x = jax.ShapeDtypeStruct((1000, 8), np.float32)
  >>> weighted = compile_program(lambda x: jax.nn.softmax(x @ x.T) @ x, x)
  >>> weighted.temporary_bytes >= 4 * 1000 * 1000
  True
  """
  compiled = jax.jit(function).lower(*arguments).compile()
  memory = compiled.memory_analysis()
  temporary = memory.temp_size_in_bytes
  lasting = memory.argument_size_in_bytes + memory.output_size_in_bytes
  return Program(compiled, temporary, temporary + lasting)
