"""Random adjectives that make sense with a noun and with each other."""

from functools import cache

from relpos_jax.data.embedded.lexicon import ADJECTIVES, SMALL_WORDS, Adjective, Noun, Pair, rows
from relpos_jax.data.embedded.sampling.dice import Dice
from relpos_jax.data.embedded.tables import words
from relpos_jax.data.embedded.tree import Quality

AND = SMALL_WORDS["and", "und"]
VERY, QUITE = SMALL_WORDS["very", "sehr"], SMALL_WORDS["quite", "ziemlich"]
TOO = SMALL_WORDS["too", "zu"]
_ANTONYMS = {frozenset(row) for row in rows(words.ANTONYMS)}


@cache
def adjectives_of(noun: Noun, groups: tuple[str, ...] = words.GROUPS) -> tuple[Adjective, ...]:
  """The adjectives of the groups that make sense with a noun."""
  return tuple(a for a in ADJECTIVES if a.classes & noun.classes and a.group in groups)


@cache
def adjective_pairs(noun: Noun) -> tuple[tuple[Adjective, Adjective], ...]:
  """Two adjectives that may stand together, in their order before the noun."""
  found = adjectives_of(noun)
  return tuple((a, b) for a in found for b in found if _may_follow(a, b))


def _may_follow(first: Adjective, second: Adjective) -> bool:
  ranks = words.GROUPS.index(first.group), words.GROUPS.index(second.group)
  in_order = ranks[0] < ranks[1] or _are_joined(first, second)
  return in_order and not _are_exclusive(first, second)


def _are_joined(first: Adjective, second: Adjective) -> bool:
  """Friendly and polite, tired and hungry; but big old."""
  groups = {first.group, second.group}
  return groups == {"quality"} or groups <= {"mood", "need"}


def _are_exclusive(first: Adjective, second: Adjective) -> bool:
  """Whether one repeats or denies the other; nothing has two colours."""
  opposed = frozenset((first.english, second.english)) in _ANTONYMS
  return first is second or opposed or first.group == second.group == "colour"


def contradicts(adjective: Adjective, said: tuple[Quality, ...]) -> bool:
  """Whether an adjective repeats or denies what is said already."""
  return any(_are_exclusive(adjective, quality.adjective) for quality in said)


def attributes(dice: Dice, noun: Noun) -> tuple[tuple[Quality, ...], Pair | None]:
  """No, one or two adjectives, and and where two of one group need it."""
  found = adjectives_of(noun)
  count = dice.weighted(((0, 62), (1, 32), (2, 6))) if found else 0
  if count == 2 and adjective_pairs(noun):
    first, second = dice.pick(adjective_pairs(noun))
    return (Quality(first), Quality(second)), AND if _are_joined(first, second) else None
  if count:
    adjective = dice.pick(found)
    return (Quality(adjective, degree(dice, adjective)),), None
  return (), None


def degree(dice: Dice, adjective: Adjective, predicate: bool = False) -> Pair | None:
  """Very, in a predicate also quite and too, before what can be compared; mostly nothing."""
  if not adjective.comparative or not dice.chance(0.3 if predicate else 0.12):
    return None
  return dice.weighted(((VERY, 6), (QUITE, 3 * predicate), (TOO, 3 * predicate)))
