"""The grammar's random choices.

Only `random.Random.random` is drawn on: Python promises its sequence for a seed in every version,
which it does not for `choice` and `shuffle`.
"""

import operator
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_WEIGHT = operator.itemgetter(1)


class Dice:
  """Random choices, the same for a seed on every machine.

  >>> Dice("embedded 0").pick("abc") == Dice("embedded 0").pick("abc")
  True
  """

  def __init__(self, seed: str):
    self._draw = random.Random(seed).random

  def chance(self, probability: float) -> bool:
    """True with this probability."""
    return self._draw() < probability

  def pick(self, options: Sequence[T]) -> T:
    """One of the options, all equally likely."""
    return options[int(self._draw() * len(options))]

  def weighted(self, options: Sequence[tuple[T, int]]) -> T:
    """One of the options, by weight; the weights need not add up to one."""
    left = self._draw() * sum(map(_WEIGHT, options))
    for option, weight in options:
      left -= weight
      if left < 0:
        return option
    return options[-1][0]
