"""Random clauses in which one part is asked for or points back: questions, relative clauses."""

from dataclasses import replace
from functools import cache

from relpos_jax.data.embedded.lexicon import (
  DETERMINERS,
  SMALL_WORDS,
  VERBS,
  Noun,
  Slot,
  Verb,
  names,
  nouns_of,
)
from relpos_jax.data.embedded.sampling.adjuncts import place_words, places_of
from relpos_jax.data.embedded.sampling.clauses import (
  PERSON_DEEDS,
  PERSON_VERBS,
  bare_clause,
  clause,
  fill,
  pick_tense,
  verbs_of,
)
from relpos_jax.data.embedded.sampling.dice import Dice
from relpos_jax.data.embedded.sampling.nominals import nominal, pick_noun
from relpos_jax.data.embedded.sampling.patterns import described, description, whereabouts
from relpos_jax.data.embedded.sampling.qualities import adjectives_of
from relpos_jax.data.embedded.tree import Clause, Nominal, NounPhrase, Phrase, Pronoun, Relative

_MINORS = ("baby", "young")
_GOAL_VERBS = tuple(verb for verb in VERBS if any(slot.marking == "goal" for slot in verb.slots))
_PLACED_VERBS = tuple(verb for verb in PERSON_VERBS if places_of(verb))


def yes_no_question(dice: Dice) -> Clause:
  """Does the teacher read the book? In German the finite verb comes first."""
  roll = dice.pick(range(8))
  if roll == 0:
    built = description(dice, "present")
  elif roll == 1:
    built = whereabouts(dice, "present")
  else:
    built = clause(dice, embedded=True)
  return yes_no_question(dice) if built.negated else replace(built, question=True, front="")


def w_question(dice: Dice, era: str = "any") -> Clause:
  """A clause that asks for one of its parts, which opens it: wer, wen, was, wo, wann, warum."""
  return replace(dice.weighted(_ASKED)(dice, era), question=True)


def ask_subject(dice: Dice, era: str) -> Clause:
  """Who reads the book? Which teacher reads the book?"""
  verb = dice.pick(PERSON_VERBS)
  if dice.chance(0.6):
    return clause(dice, subject=Pronoun("who"), verb=verb, era=era, embedded=True)
  noun = pick_noun(dice, verb.subject)
  if "kin" in noun.classes:
    return ask_subject(dice, era)
  subject = NounPhrase(noun, DETERMINERS["which"], dice.chance(0.2) and noun.german_plural != "")
  return clause(dice, subject=subject, verb=verb, era=era, embedded=True)


def ask_object(dice: Dice, era: str) -> Clause:
  """What does she read? Whom does he help? Which book, how many books does she read?"""
  verb = dice.pick(VERBS)
  slots = [slot for slot in verb.slots if not slot.optional]
  asked = [i for i, slot in enumerate(slots) if slot.marking[-2:] in ("A", "D", "+A", "+D")]
  if not asked:
    return ask_object(dice, era)
  index = dice.pick(asked)
  return gapped(dice, verb, slots, index, _asked_for(dice, slots[index]), era)


def _asked_for(dice: Dice, slot: Slot) -> Nominal:
  """Whom, what, which or how many, as the slot allows."""
  people = "person" in names(slot.classes)
  if people and dice.chance(0.6):
    return Pronoun("who")
  if not people and slot.marking == "A" and dice.chance(0.5):
    return Pronoun("what")
  noun = pick_noun(dice, slot.classes)
  if noun.classes & {"kin", "unique"}:
    return _asked_for(dice, slot)
  if noun.german_plural and slot.marking == "A" and dice.chance(0.35):
    return NounPhrase(noun, DETERMINERS["how many"], plural=True)
  return NounPhrase(noun, DETERMINERS["which"])


def gapped(
  dice: Dice, verb: Verb, slots: list[Slot], index: int, filler: Nominal, era: str
) -> Clause:
  """A clause that opens with the object at the index, which is the filler."""
  subject = nominal(dice, verb.subject)
  tense, modal = pick_tense(dice, verb, subject, era)
  german, _, case = slots[index].marking.rpartition("+")
  asked = Phrase(slots[index].english, german, case, filler)
  objects = tuple(
    asked if i == index else fill(dice, slot, subject) for i, slot in enumerate(slots)
  )
  return Clause(subject, verb, objects, tense, modal, front=str(index))


def ask_goal(dice: Dice, era: str) -> Clause:
  """Where does she go? Wohin geht sie?"""
  built = bare_clause(dice, verb=dice.pick(_GOAL_VERBS), era=era)
  return replace(built, objects=(SMALL_WORDS["where", "wohin"],), front="0")


def ask_place(dice: Dice, era: str) -> Clause:
  """Where does she work? Wo arbeitet sie?"""
  built = bare_clause(dice, verb=dice.pick(_PLACED_VERBS), era=era)
  return replace(built, place=SMALL_WORDS["where", "wo"], front="place")


def ask_time(dice: Dice, era: str) -> Clause:
  """When does she read the book? English does not ask so in the perfect."""
  verb = dice.pick(PERSON_DEEDS)
  built = bare_clause(dice, verb=verb, era="timed" if era == "any" else era)
  return replace(built, time=SMALL_WORDS["when", "wann"], front="time")


def ask_cause(dice: Dice, era: str) -> Clause:
  """Why does she read the book?"""
  built = bare_clause(dice, era=era)
  return replace(built, cause=SMALL_WORDS["why", "warum"], front="cause")


_ASKED = (
  (ask_subject, 22),
  (ask_object, 34),
  (ask_place, 12),
  (ask_goal, 8),
  (ask_time, 12),
  (ask_cause, 12),
)


def command(dice: Dice) -> Clause:
  """Please open the window."""
  built = clause(dice, subject=Pronoun("you"), verb=dice.pick(PERSON_DEEDS), embedded=True)
  please = SMALL_WORDS["please", "bitte"]
  changed = {"modal": "", "adverb": None, "time": None, "cause": None}
  return replace(built, tense="imperative", front="opener", opener=please, **changed)


@cache
def verbs_taking(noun: Noun) -> tuple[tuple[Verb, int], ...]:
  """The verbs of which a noun can be an object, with the place among those they must have."""
  found = []
  for verb in VERBS:
    slots = [slot for slot in verb.slots if not slot.optional]
    for index, slot in enumerate(slots):
      case = slot.marking in ("A", "D") or "+" in slot.marking
      if case and noun.classes & frozenset(slot.classes.split()):
        found.append((verb, index))
  return tuple(found)


@cache
def verbs_at(noun: Noun) -> tuple[Verb, ...]:
  """What people do in a place."""
  return tuple(verb for verb in _PLACED_VERBS if noun in places_of(verb))


def relative_clause(dice: Dice, head: NounPhrase, era: str, besides: Verb) -> Clause:
  """A clause about the head, opened by a relative pronoun; it rarely repeats the verb besides."""
  built = _relative_clause(dice, head, era)
  return _relative_clause(dice, head, era) if built.verb is besides else built


def _relative_clause(dice: Dice, head: NounPhrase, era: str) -> Clause:
  noun = head.noun
  human = bool(noun.classes & {"person", "baby"})
  pronoun = Relative(noun.gender, head.plural, human)
  makers = ((_about_subject, 45 * bool(verbs_of(noun) or adjectives_of(noun))),)
  makers += ((_about_object, 35 * bool(verbs_taking(noun))),)
  makers += (
    (_about_owner, 8 * (human and noun.classes.isdisjoint(_MINORS))),
    (_about_place, 60 * bool(verbs_at(noun))),
  )
  return dice.weighted(makers)(dice, head, pronoun, era)


def _about_subject(dice: Dice, head: NounPhrase, pronoun: Relative, era: str) -> Clause:
  """The teacher who reads; the book that is old."""
  noun = head.noun
  if not verbs_of(noun) or (len(adjectives_of(noun)) > 2 and dice.chance(0.12)):
    return described(
      dice, "past" if era == "past" else "present", pronoun, head.noun, said=head.qualities
    )
  return clause(dice, subject=pronoun, verb=dice.pick(verbs_of(noun)), era=era, embedded=True)


def _about_object(dice: Dice, head: NounPhrase, pronoun: Relative, era: str) -> Clause:
  """The book that the teacher reads; the man whom she helps; the bus for which he waits."""
  verb, index = dice.pick(verbs_taking(head.noun))
  slots = [slot for slot in verb.slots if not slot.optional]
  return gapped(dice, verb, slots, index, pronoun, era)


def _about_owner(dice: Dice, head: NounPhrase, pronoun: Relative, era: str) -> Clause:
  """The man whose dog barks."""
  owned = dice.pick(nouns_of("kin pet vehicle mate"))
  subject = NounPhrase(owned, DETERMINERS["zero"], owner=pronoun)
  return clause(dice, subject=subject, era=era, embedded=True)


def _about_place(dice: Dice, head: NounPhrase, pronoun: Relative, era: str) -> Clause:
  """The house in which she works."""
  built = bare_clause(dice, verb=dice.pick(verbs_at(head.noun)), era=era)
  return replace(built, place=Phrase(*place_words(head.noun, "place"), pronoun), front="place")
