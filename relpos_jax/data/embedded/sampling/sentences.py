"""Random sentences of one clause or many: coordination, subordination, relative clauses.

A budget is the number of clauses. Short and long sentences are made by the same few steps.
"""

from dataclasses import replace

from relpos_jax.data.embedded.lexicon import CLAUSE_VERBS, SMALL_WORDS, VERBS, Pair
from relpos_jax.data.embedded.sampling.clauses import (
  DEEDS,
  PERSON_VERBS,
  bare_clause,
  clause,
  deeds_besides,
)
from relpos_jax.data.embedded.sampling.dice import Dice
from relpos_jax.data.embedded.sampling.gaps import (
  command,
  relative_clause,
  w_question,
  yes_no_question,
)
from relpos_jax.data.embedded.sampling.links import (
  asked_content,
  content_kind,
  deed,
  era_of,
  governing,
  infinite_content,
  is_animate,
  may_have_subordinate,
  purpose,
  reason,
  subordinate,
)
from relpos_jax.data.embedded.sampling.nominals import adjectives_of, pronoun_for
from relpos_jax.data.embedded.sampling.patterns import described, simple
from relpos_jax.data.embedded.tree import (
  Clause,
  Link,
  Nominal,
  NounPhrase,
  Phrase,
  Pronoun,
  Quality,
  Relative,
  Sentence,
)

AND, OR, BUT = (SMALL_WORDS[pair] for pair in (("and", "und"), ("or", "oder"), ("but", "aber")))
FOR, SO = SMALL_WORDS["for", "denn"], SMALL_WORDS["so", "deshalb"]
_JOINTS = ((AND, 36), (BUT, 30), (SO, 16), (FOR, 12))
_SINGLE = ((simple, 75), (yes_no_question, 10), (w_question, 11), (command, 4))
_SHARED_TENSES = ("present", "progressive", "past", "past progressive", "future")
_DEFINABLE = ("d", "ein", "dies", "jed", "all", "viel", "einig")


def sentence(dice: Dice, budget: int) -> Sentence:
  """A random sentence of about so many clauses."""
  if budget == 1:
    built = dice.weighted(_SINGLE)(dice)
    return Sentence((built,), mark="?" if built.question else ".")
  if budget > 3 or dice.chance(0.3):
    return coordination(dice, budget)
  built = statement(dice, budget)
  if may_ask(built) and dice.chance(0.25):
    return Sentence((replace(built, question=True, front=""),), mark="?")
  return Sentence((built,))


def may_ask(built: Clause) -> bool:
  """Whether it makes a question: does she know where he lives?"""
  governs = built.link is not None and built.verb not in VERBS
  return governs and built.lead is None and built.front == "subject" and not built.negated


def coordination(dice: Dice, budget: int) -> Sentence:
  """Two or three main clauses."""
  count = 2 if budget < 4 else dice.pick((2, 2, 3)) if budget < 7 else 3
  shares = [budget // count + (index < budget % count) for index in range(count)]
  clauses, joints = [statement(dice, shares[0])], []
  for share in shares[1:]:
    joints.append(pick_joint(dice, clauses[-1]))
    clauses.append(continuation(dice, clauses[-1], joints[-1], share))
  return Sentence(tuple(clauses), tuple(joints))


def pick_joint(dice: Dice, before: Clause) -> Pair:
  """Or only between plans; so and for only where there can be a reason."""
  plan = (before.modal or before.tense == "future") and before.link is None
  if plan and may_conjoin(before) and dice.chance(0.25):
    return OR
  return dice.weighted(_JOINTS if may_have_subordinate(before) else _JOINTS[:2])


def continuation(dice: Dice, before: Clause, joint: Pair, budget: int) -> Clause:
  """The next main clause, often about the subject of the one before.

  After so nothing is fronted: German deshalb stands there.
  """
  if joint is OR:
    return replace(
      another_deed(dice, before), subject=pronoun_for(before.subject) or before.subject
    )
  if joint is FOR:
    return extend(dice, reason(dice, before), budget - 1)
  if joint is not SO and (dice.chance(0.3) or not is_animate(before.subject)):
    return contrast(dice, before, budget)
  built = deed(dice, before.subject, era_of(before), before.verb, embedded=joint is SO)
  built = extend(dice, built, budget - 1)
  return replace(built, front="") if joint is SO else built


def contrast(dice: Dice, before: Clause, budget: int) -> Clause:
  """What is said of somebody or something else, or of the same thing."""
  subject, era = before.subject, era_of(before)
  if is_animate(subject):
    return extend(dice, clause(dice, verb=dice.pick(PERSON_VERBS), era=era), budget - 1)
  known = isinstance(subject, NounPhrase) and pronoun_for(subject) is not None
  if known and len(adjectives_of(subject.noun)) > 1 and dice.chance(0.7):
    said = tuple(node for node in before.objects if isinstance(node, Quality))
    return described(dice, era, pronoun_for(subject), subject.noun, said=said)
  return statement(dice, budget, era)


def statement(dice: Dice, budget: int, era: str = "any", embedded: bool = False) -> Clause:
  """A random statement of so many clauses."""
  if budget == 1:
    return simple(dice, era, embedded)
  before = dice.weighted(((0, 60), (1, 40), (2, 25 * (budget > 3))))
  rest = budget - 1 - before
  if rest and dice.chance(0.35):
    built = with_content(dice, governing(dice, era, embedded), rest)
  else:
    built = extend(dice, simple(dice, era, embedded), rest)
  return preceded(dice, built, before, embedded)


def with_content(dice: Dice, built: Clause, budget: int) -> Clause:
  """Gives a verb the clause that it governs."""
  kind = content_kind(dice, built.verb)
  if kind in ("zu", "gerund"):
    return replace(built, link=infinite_content(dice, built, kind))
  if kind == "question":
    return replace(built, link=asked_content(dice, built))
  era = "past" if era_of(built) == "past" else "any"
  if dice.chance(0.25):
    inner = extend(dice, deed(dice, built.subject, era), budget - 1)
  else:
    inner = statement(dice, budget, era, embedded=True)
  words = SMALL_WORDS[("that", "dass") if kind == "that" else ("whether", "ob")]
  return replace(built, link=Link(words, "finite", inner))


def preceded(dice: Dice, built: Clause, budget: int, embedded: bool) -> Clause:
  """Puts a subordinate clause before the sentence, or a relative one into its subject."""
  subject = built.subject
  relatable = isinstance(subject, NounPhrase) and may_have_relative(subject)
  if budget and relatable and (embedded or dice.chance(0.5)):
    return replace(built, subject=with_relative(dice, subject, budget, era_of(built)))
  if not budget or embedded or not may_have_subordinate(built):
    return built
  if built.verb in CLAUSE_VERBS:
    built = replace(built, time=None)
  lead = extended_link(dice, subordinate(dice, built), budget - 1)
  if built.link and built.link.words is lead.words:
    return built
  return introduced(replace(built, lead=lead, front="", opener=None))


def introduced(built: Clause) -> Clause:
  """Names the subject in the clause that comes first; a pronoun takes it up in the main one."""
  first, reference = built.lead.clause, pronoun_for(built.subject)
  back = isinstance(first.subject, Pronoun) and reference is not None
  if not back or first.subject.english != reference.english:
    return built
  lead = replace(built.lead, clause=with_subject(first, built.subject))
  return replace(with_subject(built, reference), lead=lead)


def with_subject(clause: Clause, subject: Nominal) -> Clause:
  """The clause with another subject of the same person."""
  also = tuple(replace(other, subject=subject) for other in clause.also)
  return replace(clause, subject=subject, also=also)


def may_have_relative(node: NounPhrase) -> bool:
  """Whether a relative clause can define it: not my mother, not the sun."""
  plain = node.relative is None and node.owner is None and node.determiner.german in _DEFINABLE
  return plain and not node.noun.classes & {"kin", "unique"}


def with_relative(dice: Dice, head: NounPhrase, budget: int, era: str) -> NounPhrase:
  """The noun phrase with a relative clause of so many clauses."""
  return replace(head, relative=extend(dice, relative_clause(dice, head, era), budget - 1))


def extend(dice: Dice, built: Clause, budget: int, subordination: int = 45) -> Clause:
  """Adds clauses at the end: subordinate or relative ones, a purpose, another verb phrase."""
  options = (
    (_subordinate, subordination * may_have_subordinate(built)),
    (_define_object, 32 * may_define_object(built)),
    (_conjoin, 16 * may_conjoin(built)),
    (_purpose, 10 * may_have_purpose(built)),
  )
  if budget < 1 or built.link or has_object_relative(built) or not any(w for _, w in options):
    return built
  return dice.weighted(options)(dice, built, budget)


def extended_link(dice: Dice, link: Link, budget: int) -> Link:
  """The dependent clause with so many more at its end, but no because after because."""
  inner = extend(dice, link.clause, budget, subordination=12)
  repeated = inner.link is not None and inner.link.words is link.words
  return link if repeated else replace(link, clause=inner)


def _subordinate(dice: Dice, built: Clause, budget: int) -> Clause:
  return replace(built, link=extended_link(dice, subordinate(dice, built), budget - 1))


def _purpose(dice: Dice, built: Clause, budget: int) -> Clause:
  return replace(built, link=purpose(dice, built))


def _conjoin(dice: Dice, built: Clause, budget: int) -> Clause:
  plan = built.modal or built.tense == "future"
  joint = OR if plan and dice.chance(0.3) else AND
  return replace(built, also=(another_deed(dice, built),), joint=joint)


def _define_object(dice: Dice, built: Clause, budget: int) -> Clause:
  last = built.objects[-1]
  head = with_relative(dice, last.nominal, budget, era_of(built))
  return replace(built, objects=(*built.objects[:-1], replace(last, nominal=head)))


def has_object_relative(built: Clause) -> bool:
  """Whether an object already has a relative clause."""
  phrases = (node.nominal for node in built.objects if isinstance(node, Phrase))
  return any(isinstance(node, NounPhrase) and node.relative for node in phrases)


def may_define_object(built: Clause) -> bool:
  """The last object takes a relative clause if nothing follows it in either language."""
  last = built.objects[-1] if built.objects else None
  if not isinstance(last, Phrase) or not isinstance(last.nominal, NounPhrase) or built.also:
    return False
  after = {name for name in ("time", "manner", "place", "cause") if getattr(built, name)}
  followed = after - {built.front} or built.negated or built.adverb or built.front.isdigit()
  alone = len(built.objects) == 1 or bool(last.german)
  return alone and not followed and last.case != "N" and may_have_relative(last.nominal)


def may_conjoin(built: Clause) -> bool:
  """Whether another verb phrase can share the subject and the tense."""
  plain = not built.negated and not built.adverb and not built.front.isdigit()
  deed_like = built.verb in DEEDS and built.tense in _SHARED_TENSES
  return plain and deed_like and not isinstance(built.subject, Relative) and _is_versatile(built)


def another_deed(dice: Dice, built: Clause) -> Clause:
  """What the same subject does besides, in the same tense, with the same modal."""
  other = bare_clause(dice, subject=built.subject, verb=dice.pick(deeds_besides(built)))
  return replace(other, tense=built.tense, modal=built.modal)


def may_have_purpose(built: Clause) -> bool:
  """Only persons who do something mean something by it."""
  plain = not built.negated and not built.also and not built.front.isdigit()
  known = pronoun_for(built.subject) is not None
  return plain and known and built.verb in DEEDS and _is_versatile(built)


def _is_versatile(built: Clause) -> bool:
  return bool(deeds_besides(built))
