"""Random clauses added to a clause: at its end, before it, in its subject."""

from dataclasses import replace
from typing import TypeGuard

from relpos_jax.data.embedded.lexicon import CLAUSE_VERBS, SMALL_WORDS
from relpos_jax.data.embedded.sampling.clauses import DEEDS, bare_clause, deeds_besides
from relpos_jax.data.embedded.sampling.contents import purpose
from relpos_jax.data.embedded.sampling.dice import Dice
from relpos_jax.data.embedded.sampling.gaps import relative_clause
from relpos_jax.data.embedded.sampling.links import (
  era_of,
  may_have_subordinate,
  subordinate,
)
from relpos_jax.data.embedded.sampling.references import pronoun_for
from relpos_jax.data.embedded.tree import (
  Clause,
  Link,
  Nominal,
  NounPhrase,
  Phrase,
  Pronoun,
  Relative,
)

AND, OR = SMALL_WORDS["and", "und"], SMALL_WORDS["or", "oder"]
_SHARED_TENSES = ("present", "progressive", "past", "past progressive", "future")
_DEFINABLE = ("d", "ein", "dies", "jed", "all", "viel", "einig")
_ADJUNCTS = ("time", "manner", "place", "cause")


def extend(dice: Dice, built: Clause, budget: int, subordination: int = 45) -> Clause:
  """Adds so many clauses at the end: subordinate or relative, a purpose, another verb phrase."""
  if budget < 1 or built.link or any(map(has_relative, built.objects)):
    return built
  options = (
    (_add_subordinate, subordination * may_have_subordinate(built)),
    (_define_object, 32 * may_define_object(built)),
    (_conjoin, 16 * may_conjoin(built)),
    (_add_purpose, 10 * may_have_purpose(built)),
  )
  if not any(weight for _, weight in options):
    return built
  return dice.weighted(options)(dice, built, budget)


def has_relative(node: object) -> bool:
  """Whether an object already has a relative clause."""
  phrase = node.nominal if isinstance(node, Phrase) else None
  return isinstance(phrase, NounPhrase) and phrase.relative is not None


def _add_subordinate(dice: Dice, built: Clause, budget: int) -> Clause:
  return replace(built, link=extended(dice, subordinate(dice, built), budget - 1))


def _add_purpose(dice: Dice, built: Clause, budget: int) -> Clause:
  return replace(built, link=purpose(dice, built))


def _conjoin(dice: Dice, built: Clause, budget: int) -> Clause:
  plan = built.modal or built.tense == "future"
  joint = OR if plan and dice.chance(0.3) else AND
  return replace(built, also=(another_deed(dice, built),), joint=joint)


def _define_object(dice: Dice, built: Clause, budget: int) -> Clause:
  *others, last = built.objects
  if isinstance(last, Phrase) and may_have_relative(last.nominal):
    last = replace(last, nominal=with_relative(dice, last.nominal, budget, built))
  return replace(built, objects=(*others, last))


def extended(dice: Dice, link: Link, budget: int) -> Link:
  """The dependent clause with so many more at its end, but no because after because."""
  inner = extend(dice, link.clause, budget, subordination=12)
  repeated = inner.link is not None and inner.link.words is link.words
  return link if repeated else replace(link, clause=inner)


def another_deed(dice: Dice, built: Clause) -> Clause:
  """What the same subject does besides, in the same tense, with the same modal."""
  other = bare_clause(dice, subject=built.subject, verb=dice.pick(deeds_besides(built)))
  return replace(other, tense=built.tense, modal=built.modal)


def may_define_object(built: Clause) -> bool:
  """The last object takes a relative clause if nothing follows it in either language."""
  last = built.objects[-1] if built.objects else None
  if not isinstance(last, Phrase) or built.also:
    return False
  after = {name for name in _ADJUNCTS if getattr(built, name)} - {built.front}
  followed = after or built.negated or built.adverb or built.front.isdigit()
  alone = len(built.objects) == 1 or bool(last.german)
  return alone and not followed and last.case != "N" and may_have_relative(last.nominal)


def may_conjoin(built: Clause) -> bool:
  """Whether another verb phrase can share the subject and the tense."""
  if built.negated or built.adverb or built.front.isdigit() or isinstance(built.subject, Relative):
    return False
  deed = built.verb in DEEDS and built.tense in _SHARED_TENSES
  return deed and bool(deeds_besides(built))


def may_have_purpose(built: Clause) -> bool:
  """Only who does something means something by it."""
  if built.negated or built.also or built.front.isdigit() or built.verb not in DEEDS:
    return False
  return pronoun_for(built.subject) is not None and bool(deeds_besides(built))


def may_have_relative(node: Nominal) -> TypeGuard[NounPhrase]:
  """Whether a relative clause can define it: not my mother, not the sun."""
  if not isinstance(node, NounPhrase) or node.relative or node.owner:
    return False
  return node.determiner.german in _DEFINABLE and not node.noun.classes & {"kin", "unique"}


def with_relative(dice: Dice, head: NounPhrase, budget: int, built: Clause) -> NounPhrase:
  """The noun phrase with a relative clause of so many clauses, in the era of the clause around."""
  relative = relative_clause(dice, head, era_of(built), besides=built.verb)
  return replace(head, relative=extend(dice, relative, budget - 1))


def preceded(dice: Dice, built: Clause, budget: int, embedded: bool) -> Clause:
  """Puts a subordinate clause before the sentence, or a relative one into its subject."""
  if not budget:
    return built
  if may_have_relative(built.subject) and (embedded or dice.chance(0.5)):
    return replace(built, subject=with_relative(dice, built.subject, budget, built))
  if embedded or not may_have_subordinate(built):
    return built
  lead = extended(dice, subordinate(dice, built, leads=True), budget - 1)
  if built.link and built.link.words is lead.words:
    return built
  time = None if built.verb in CLAUSE_VERBS else built.time
  return introduced(replace(built, front="", opener=None, time=time), lead)


def introduced(built: Clause, lead: Link) -> Clause:
  """Names the subject in the clause that comes first; a pronoun takes it up in the main one."""
  subject, reference = lead.clause.subject, pronoun_for(built.subject)
  if reference and isinstance(subject, Pronoun) and subject.english == reference.english:
    lead = replace(lead, clause=with_subject(lead.clause, built.subject))
    built = with_subject(built, reference)
  return replace(built, lead=lead)


def with_subject(clause: Clause, subject: Nominal) -> Clause:
  """The clause with another subject of the same person."""
  also = tuple(replace(other, subject=subject) for other in clause.also)
  return replace(clause, subject=subject, also=also)
