"""Random adjuncts that fit a clause: time, frequency, manner, place, cause; and what is fronted."""

from dataclasses import replace
from functools import cache

from relpos_jax.data.embedded.english import forms as english
from relpos_jax.data.embedded.german import nominals as german
from relpos_jax.data.embedded.lexicon import (
  ADVERBS,
  CAUSES,
  DETERMINERS,
  MANNERS,
  OPENERS,
  PLACES,
  SPOTS,
  TIMES,
  UNITS,
  Noun,
  Pair,
  Verb,
  nouns_of,
)
from relpos_jax.data.embedded.sampling.dice import Dice
from relpos_jax.data.embedded.sampling.nominals import noun_phrase
from relpos_jax.data.embedded.sampling.references import is_known
from relpos_jax.data.embedded.tree import Clause, Nominal, NounPhrase, Part, Phrase

_TIME_TAGS = {"progressive": "now", "present": "habit", "past progressive": "past"}
# Nicht mehr ein Buch would have to be kein Buch mehr, and nie viele Bücher is unclear.
_NEEDS_KNOWN_OBJECTS = ("not yet", "no longer", "never", "rarely")
_RARE = frozenset(("chance", "once"))
_FRONTED = (("opener", 0.03), ("time", 0.42), ("cause", 0.5), ("place", 0.12))


def with_adjuncts(dice: Dice, clause: Clause, fronting: bool = True) -> Clause:
  """Adds adjuncts that fit and, in a main clause, fronts one of them."""
  added: dict[str, Part | None] = {"time": pick_time(dice, clause) if dice.chance(0.4) else None}
  if added["time"] is None and dice.chance(0.25):
    added["adverb"] = pick_adverb(dice, clause)
  if not clause.negated and dice.chance(0.22):
    added["manner"] = pick_manner(dice, clause.verb)
  if not clause.negated and dice.chance(0.35):
    added["place"] = pick_place(dice, clause.verb, clause.subject)
  if "state" not in clause.verb.tags and dice.chance(0.04):
    added["cause"] = pick_cause(dice)
  if not fronting:
    return replace(clause, **added)
  added["opener"] = dice.pick(OPENERS if clause.tense == "past" else OPENERS[:3])
  front = pick_front(dice, added)
  if front != "opener":
    del added["opener"]
  return replace(clause, **added, front=front)


def setting(dice: Dice, built: Clause) -> Clause:
  """Adds a manner or a place, but no time: the conjunction tells that."""
  manner = pick_manner(dice, built.verb) if dice.chance(0.15) else None
  place = pick_place(dice, built.verb, built.subject) if dice.chance(0.25) else None
  return replace(built, manner=manner, place=place)


def pick_front(dice: Dice, added: dict) -> str:
  """The constituent that opens the clause: mostly the subject."""
  for name, probability in _FRONTED:
    if added.get(name) and dice.chance(probability):
      return name
  return "subject"


@cache
def tagged(pairs: tuple[Pair, ...], tag: str) -> tuple[Pair, ...]:
  """The words that go with a tense."""
  return tuple(pair for pair in pairs if tag in pair.tags)


def time_tag(clause: Clause) -> str:
  """The tag of the times that go with the tense of a clause."""
  if clause.modal and (clause.tense == "present" or clause.modal == "sollen"):
    return "future"
  return _TIME_TAGS.get(clause.tense, clause.tense)


def pick_time(dice: Dice, clause: Clause) -> Pair | None:
  """A time that goes with the tense; what happens by chance does not happen every day."""
  tag = time_tag(clause)
  if "state" in clause.verb.tags or (tag == "habit" and clause.verb.tags & _RARE):
    return None
  if tag in ("past", "future") and dice.chance(0.12):
    return counted_time(dice, tag)
  if tag in ("past", "future", "habit") and dice.chance(0.08):
    return clock_time(dice)
  found = tagged(TIMES, tag) if tag != "habit" or not clause.negated else ()
  return dice.pick(found) if found else None


def clock_time(dice: Dice) -> Pair:
  """At eight o'clock."""
  hour = dice.pick(range(1, 13))
  return Pair(f"at {english.number_word(hour)} o'clock", f"um {german.number_word(hour)} Uhr")


def counted_time(dice: Dice, tag: str) -> Pair:
  """Three days ago, in three days."""
  number, unit = dice.pick(range(2, 11)), dice.pick(UNITS)
  words = f"{english.number_word(number)} {unit.english}"
  german_words = f"{german.number_word(number)} {unit.german}"
  if tag == "past":
    return Pair(f"{words} ago", f"vor {german_words}")
  return Pair(f"in {words}", f"in {german_words}")


def pick_adverb(dice: Dice, clause: Clause) -> Pair | None:
  """Always, already, still: if one goes with tense, verb and objects."""
  if clause.negated or clause.modal or clause.verb.tags & {"state", "told", *_RARE}:
    return None
  found = tagged(ADVERBS, _TIME_TAGS.get(clause.tense, clause.tense))
  adverb = dice.pick(found) if found else None
  known = all(not isinstance(part, Phrase) or is_known(part.nominal) for part in clause.objects)
  return adverb if known or adverb is None or adverb.english not in _NEEDS_KNOWN_OBJECTS else None


def pick_manner(dice: Dice, verb: Verb) -> Pair | None:
  """An adverb of manner, where one goes with the verb."""
  found = manners_of(verb)
  return dice.pick(found) if found else None


@cache
def manners_of(verb: Verb) -> tuple[Pair, ...]:
  """The adverbs of manner that go with a verb."""
  return tuple(manner for manner in MANNERS if verb.tags.intersection(manner.tags))


def pick_place(dice: Dice, verb: Verb, subject: Nominal) -> Phrase | None:
  """Where it happens, where the verb says something about that."""
  found = places_of(verb)
  return place_phrase(dice, dice.pick(found), "place", subject) if found else None


@cache
def places_of(verb: Verb) -> tuple[Noun, ...]:
  """The places where it happens: @home for everything at home."""
  return nouns_of(" ".join(sorted(tag[1:] for tag in verb.tags if tag.startswith("@"))))


def place_phrase(dice: Dice, noun: Noun, kind: str, subject: Nominal | None = None) -> Phrase:
  """A place (in the garden), goal (into the garden) or origin (from the garden)."""
  phrase = noun_phrase(dice, noun, subject=subject, place=True)
  english_word, german_word, case = place_words(noun, kind)
  return Phrase(english_word, german_word, case, phrase)


def place_words(noun: Noun, kind: str) -> tuple[str, str, str]:
  """The prepositions of a place, and the case of the German one."""
  where, where_german, goal, goal_german, origin = PLACES[noun.place]
  if kind == "origin":
    return "from", origin, "D"
  word, marking = (where, where_german) if kind == "place" else (goal, goal_german)
  german_word, case = marking.split("+")
  return word, german_word, case


def spot_phrase(dice: Dice, classes: str, subject: Nominal | None = None) -> Phrase:
  """On the table, under the tree."""
  preposition, noun = dice.pick(spots(classes))
  german_word, case = preposition.german.split("+")
  phrase = noun_phrase(dice, noun, subject=subject, place=True)
  return Phrase(preposition.english, german_word, case, phrase)


@cache
def spots(classes: str) -> tuple[tuple[Pair, Noun], ...]:
  """The prepositions of place with the nouns of the classes that each goes with."""
  allowed = frozenset(nouns_of(classes))
  return tuple((row, n) for row in SPOTS for n in nouns_of(" ".join(row.tags)) if n in allowed)


def pick_cause(dice: Dice) -> Phrase:
  """Because of the rain, despite the noise: German with the genitive."""
  pair = dice.pick(CAUSES)
  noun = dice.pick(nouns_of("cause"))
  return Phrase(pair.english, pair.german, "G", NounPhrase(noun, DETERMINERS["the"]))
