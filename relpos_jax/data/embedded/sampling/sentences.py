"""Random sentences of one clause or many.

A budget is the number of clauses. Short and long sentences are made by the same few steps.
"""

from dataclasses import replace

from relpos_jax.data.embedded.lexicon import SMALL_WORDS, VERBS, Pair
from relpos_jax.data.embedded.sampling.clauses import PERSON_VERBS, clause
from relpos_jax.data.embedded.sampling.contents import (
  asked_content,
  content_kind,
  governing,
  infinite_content,
)
from relpos_jax.data.embedded.sampling.dice import Dice
from relpos_jax.data.embedded.sampling.extensions import (
  AND,
  OR,
  another_deed,
  extend,
  may_conjoin,
  preceded,
)
from relpos_jax.data.embedded.sampling.gaps import command, w_question, yes_no_question
from relpos_jax.data.embedded.sampling.links import (
  deed,
  era_of,
  may_have_subordinate,
  reason,
  said_of,
)
from relpos_jax.data.embedded.sampling.nominals import nominal
from relpos_jax.data.embedded.sampling.patterns import described, simple
from relpos_jax.data.embedded.sampling.qualities import adjectives_of
from relpos_jax.data.embedded.sampling.references import is_animate, noun_of, pronoun_for
from relpos_jax.data.embedded.tree import Clause, Link, Quality, Sentence

BUT, FOR = SMALL_WORDS["but", "aber"], SMALL_WORDS["for", "denn"]
SO = SMALL_WORDS["so", "deshalb"]
_JOINTS = ((AND, 36), (BUT, 30), (SO, 16), (FOR, 12))
_SINGLE = ((simple, 75), (yes_no_question, 10), (w_question, 11), (command, 4))


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
    joints.append(pick_joint(dice, clauses[-1], joints))
    clauses.append(continuation(dice, clauses[-1], joints[-1], share))
  return Sentence(tuple(clauses), tuple(joints))


def pick_joint(dice: Dice, before: Clause, used: list[Pair]) -> Pair:
  """Or only between plans; so and for only where there can be a reason; none but and twice."""
  plan = (before.modal or before.tense == "future") and before.link is None
  if plan and may_conjoin(before) and dice.chance(0.25):
    return OR
  options = _JOINTS if may_have_subordinate(before) else _JOINTS[:2]
  return dice.weighted([row for row in options if row[0] is AND or row[0] not in used])


def continuation(dice: Dice, before: Clause, joint: Pair, budget: int) -> Clause:
  """The next main clause, often about the subject of the one before.

  After so nothing is fronted: German deshalb stands there.
  """
  if joint is OR:
    subject = pronoun_for(before.subject) or before.subject
    return replace(another_deed(dice, before), subject=subject)
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
    verb = dice.pick(PERSON_VERBS)
    other = nominal(dice, verb.subject, subject=subject)
    return extend(dice, clause(dice, subject=other, verb=verb, era=era), budget - 1)
  reference, noun = pronoun_for(subject), noun_of(subject)
  if reference and noun and len(adjectives_of(noun)) > 3 and dice.chance(0.7):
    predicates = tuple(node for node in before.objects if isinstance(node, Quality))
    return described(dice, era, reference, noun, said=predicates + said_of(subject))
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
