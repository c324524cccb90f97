"""The splits of the corpus: which sentence goes where."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from relpos_jax.data.embedded.sampling.dice import Dice
from relpos_jax.data.embedded.sampling.sentences import sentence
from relpos_jax.data.embedded.surface import pair
from relpos_jax.data.embedded.tree import Sentence

MIN_WORDS, MAX_WORDS, MAX_LONG_WORDS = 3, 30, 60
SIZES = {"valid": 500, "test": 500, "long": 200}
# How many clauses a sentence has, by weight.
_CLAUSES = ((1, 60), (2, 28), (3, 9), (4, 3))
_LONG_CLAUSES = ((5, 1), (6, 2), (7, 2), (8, 1))


class Derivation(NamedTuple):
  """A tree of the grammar and its two sentences."""

  tree: Sentence
  source: str
  target: str


def derivations(seed: int, train_size: int) -> Iterator[tuple[str, Derivation]]:
  """Yields the derivations, each with its split; no sentence of either language is in two.

  Each split has its own dice, and train comes last: the others do not depend on its size.
  """
  seen: set[str] = set()
  for name, size in {**SIZES, "train": train_size}.items():
    new = _new(_stream(Dice(f"embedded {seed} {name}"), name == "long"), seen)
    for derivation in itertools.islice(new, size):
      yield name, derivation


def _stream(dice: Dice, is_long: bool) -> Iterator[Derivation]:
  """Endless derivations of the right length."""
  clauses = _LONG_CLAUSES if is_long else _CLAUSES
  shortest, longest = (MAX_WORDS + 1, MAX_LONG_WORDS) if is_long else (MIN_WORDS, MAX_WORDS)
  while True:
    tree = sentence(dice, dice.weighted(clauses))
    source, target = pair(tree)
    if all(shortest <= len(text.split()) <= longest for text in (source, target)):
      yield Derivation(tree, source, target)


def _new(stream: Iterator[Derivation], seen: set[str]) -> Iterator[Derivation]:
  """Those of which neither sentence was seen before."""
  for derivation in stream:
    if derivation.source not in seen and derivation.target not in seen:
      seen.update(derivation[1:])
      yield derivation
