"""Random simple clauses: a verb, its subject and objects, tense and modal, negation."""

from dataclasses import replace
from functools import cache

from relpos_jax.data.embedded.english import forms as english
from relpos_jax.data.embedded.lexicon import (
  DETERMINERS,
  SMALL_WORDS,
  TOWNS,
  VERBS,
  Noun,
  Slot,
  Verb,
  names,
  nouns_of,
)
from relpos_jax.data.embedded.sampling.adjuncts import place_phrase, spot_phrase, with_adjuncts
from relpos_jax.data.embedded.sampling.dice import Dice
from relpos_jax.data.embedded.sampling.nominals import nominal, noun_phrase, pick_noun, things
from relpos_jax.data.embedded.sampling.references import is_known
from relpos_jax.data.embedded.tree import (
  Clause,
  Name,
  Nominal,
  NounPhrase,
  Part,
  Phrase,
  Pronoun,
  person,
)

# Tenses by weight. An era is what may be said beside another clause.
ERAS: dict[str, tuple[tuple[str, int], ...]] = {
  "any": (
    *(("present", 30), ("progressive", 18), ("past", 25), ("perfect", 13), ("future", 7)),
    ("modal", 15),
  ),
  "timed": (("present", 30), ("progressive", 18), ("past", 30), ("future", 12), ("modal", 15)),
  "present": (("present", 45), ("progressive", 20), ("perfect", 18), ("modal", 17)),
  "past": (("past", 80), ("past modal", 20)),
  "simple present": (("present", 1),),
  "simple past": (("past", 1),),
  "completed": (("perfect", 1),),
  "ongoing present": (("progressive", 1),),
  "ongoing past": (("past progressive", 1),),
  "pluperfect": (("pluperfect", 1),),
}
_PAST_MODALS = (("können", 30), ("müssen", 25), ("wollen", 20), ("dürfen", 12))
_MODALS = (*_PAST_MODALS, ("möchten", 12), ("sollen", 12))
_NO_PROGRESSIVE = frozenset(("state", "chance", "point"))
_NO_MODAL = frozenset(("state", "chance", "point", "told"))
_WITHOUT_PROGRESSIVE = {"progressive": "present", "past progressive": "past"}
_WITHOUT_MODAL = {"modal": "present", "past modal": "past"}
_TIMELESS = {"perfect": "present", "future": "present"}


@cache
def verbs_of(noun: Noun) -> tuple[Verb, ...]:
  """The verbs of which a noun can be the subject."""
  return tuple(verb for verb in VERBS if noun.classes & frozenset(verb.subject.split()))


PERSON_VERBS = tuple(verb for verb in VERBS if "person" in verb.subject.split())
DEEDS = frozenset(verb for verb in VERBS if not verb.tags & _NO_MODAL)
PERSON_DEEDS = tuple(verb for verb in PERSON_VERBS if verb in DEEDS)


def verbs_with(subject: Nominal) -> tuple[Verb, ...]:
  """The verbs of which a nominal can be the subject."""
  if isinstance(subject, NounPhrase | Pronoun) and subject.noun:
    return verbs_of(subject.noun)
  return PERSON_VERBS


def deeds_besides(clause: Clause) -> list[Verb]:
  """What the subject of a clause can do on purpose, but what it does there."""
  return [v for v in verbs_with(clause.subject) if v in DEEDS and v is not clause.verb]


def clause(
  dice: Dice,
  *,
  subject: Nominal | None = None,
  verb: Verb | None = None,
  era: str = "any",
  embedded: bool = False,
) -> Clause:
  """A random clause with adjuncts, sometimes negated.

  Args:
    subject: the subject, or None for a random one.
    verb: the verb, or None for a random one that goes with the subject.
    era: the tenses to choose from, a key of ERAS.
    embedded: whether it is subordinate, so that nothing is fronted.
  """
  built = bare_clause(dice, subject=subject, verb=verb, era=era)
  if dice.chance(0.15):
    built = negated(built)
  return with_adjuncts(dice, built, fronting=not embedded)


def bare_clause(
  dice: Dice, *, subject: Nominal | None = None, verb: Verb | None = None, era: str = "any"
) -> Clause:
  """A random clause of subject, verb and objects."""
  verb = verb or dice.pick(verbs_with(subject) if subject else VERBS)
  subject = subject or nominal(dice, verb.subject)
  tense, modal = pick_tense(dice, verb, subject, era)
  slots = [slot for slot in verb.slots if not slot.optional or dice.chance(0.35)]
  return Clause(subject, verb, tuple(fill(dice, slot, subject) for slot in slots), tense, modal)


def pick_tense(dice: Dice, verb: Verb, subject: Nominal, era: str) -> tuple[str, str]:
  """A tense that the verb allows, and a modal or nothing."""
  tense = dice.weighted(ERAS[era])
  if verb.tags & _NO_MODAL:
    tense = _WITHOUT_MODAL.get(tense, tense)
  if verb.tags & _NO_PROGRESSIVE:
    tense = _WITHOUT_PROGRESSIVE.get(tense, tense)
  if "state" in verb.tags:
    tense = _TIMELESS.get(tense, tense)
  if tense == "past modal":
    return "past", dice.weighted(_PAST_MODALS)
  if tense == "modal":
    modal = dice.weighted(_MODALS)
    return "past" if modal == "sollen" else "present", modal
  # They read the book: only the progressive shows that it is past.
  ambiguous = person(subject) != "3s" and english.is_past_ambiguous(verb.english.split()[0])
  return "past progressive" if tense == "past" and ambiguous else tense, ""


def fill(dice: Dice, slot: Slot, subject: Nominal) -> Part:
  """A random object for a slot of the verb."""
  if slot.marking == "town":
    pair = dice.pick(TOWNS)
    return Phrase("to", "nach", "D", Name(pair.english, pair.german))
  if slot.marking == "spot":
    return spot_phrase(dice, slot.classes, subject)
  if slot.marking in ("goal", "place", "origin"):
    if slot.marking == "goal" and "home" in slot.classes and dice.chance(0.15):
      return SMALL_WORDS["home", "nach Hause"]
    return place_phrase(dice, dice.pick(nouns_of(slot.classes)), slot.marking, subject)
  german, _, case = slot.marking.rpartition("+")
  if slot.classes == "instrument":
    return Phrase("", "", "A", NounPhrase(pick_noun(dice, "instrument"), DETERMINERS["the, bare"]))
  impersonal = "person" not in names(slot.classes)
  if german and impersonal:
    filler = noun_phrase(dice, pick_noun(dice, slot.classes), subject=subject, plural=False)
  elif slot.marking == "A" and impersonal and dice.chance(0.08):
    filler = things(dice, slot.classes, subject)
  else:
    filler = nominal(dice, slot.classes, subject=subject, bare=case == "A" and not german)
  return Phrase(slot.english, german, case, filler)


def negated(clause: Clause) -> Clause:
  """The clause negated, with not any (kein) for an indefinite object; as it was if that is odd."""
  objects = tuple(_under_negation(node) for node in clause.objects)
  if not is_known(clause.subject) or None in objects:
    return clause
  return replace(clause, negated=True, objects=objects)


def _under_negation(node: Part) -> Part | None:
  """Known things stay, a book becomes any book; None for the others: not to many books."""
  if not isinstance(node, Phrase) or is_known(node.nominal):
    return node
  phrase = node.nominal
  if node.german or node.case == "D" or not isinstance(phrase, NounPhrase) or phrase.number:
    return None
  if phrase.determiner.german not in ("", "ein"):
    return None
  return replace(node, nominal=replace(phrase, determiner=DETERMINERS["any"]))
