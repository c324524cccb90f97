"""Random subordinate clauses: reasons, and what happens meanwhile, before or after."""

from relpos_jax.data.embedded.lexicon import CLAUSE_VERBS, SMALL_WORDS, VERBS, Verb
from relpos_jax.data.embedded.sampling.adjuncts import setting
from relpos_jax.data.embedded.sampling.clauses import (
  PERSON_VERBS,
  bare_clause,
  clause,
  verbs_with,
)
from relpos_jax.data.embedded.sampling.dice import Dice
from relpos_jax.data.embedded.sampling.nominals import new_person
from relpos_jax.data.embedded.sampling.patterns import bad_weather, described
from relpos_jax.data.embedded.sampling.qualities import adjectives_of, contradicts
from relpos_jax.data.embedded.sampling.references import is_animate, noun_of, pronoun_for
from relpos_jax.data.embedded.tree import (
  Clause,
  Link,
  Nominal,
  NounPhrase,
  Phrase,
  Pronoun,
  Quality,
)

_PAST = ("past", "past progressive", "pluperfect")
_STATES = frozenset(verb for verb in VERBS if "state" in verb.tags)
_ALL_SCENES = tuple(verb for verb in VERBS if not verb.tags & {"state", "chance"})
_PERSON_SCENES = tuple(verb for verb in PERSON_VERBS if not verb.tags & {"state", "chance"})
_SCENES = frozenset(_ALL_SCENES)
_MOOD, _NEED, _MERIT = ("mood",), ("mood", "need"), ("quality", "size")

# english, german, the tenses of the main clause, weight, the era of the subordinate clause
_REASONS = (("because", "weil", 60), ("although", "obwohl", 28))
_SCENIC = (
  ("if", "wenn", ("present", "future", "modal"), 14, "simple present"),
  ("when", "wenn", ("present", "future", "modal"), 12, "simple present"),
  ("when", "als", ("past",), 22, "simple past"),
  ("while", "während", ("present", "progressive"), 12, "ongoing present"),
  ("while", "während", ("past",), 12, "ongoing past"),
  ("before", "bevor", ("present", "future", "modal"), 7, "simple present"),
  ("before", "bevor", ("past",), 8, "simple past"),
  ("after", "nachdem", ("present", "future"), 7, "completed"),
  ("after", "nachdem", ("past",), 14, "pluperfect"),
  ("as soon as", "sobald", ("present", "future", "modal"), 7, "simple present"),
  ("until", "bis", ("lasting present",), 40, "simple present"),
  ("until", "bis", ("lasting past",), 40, "simple past"),
)


def era_of(clause: Clause) -> str:
  """The era in which another clause goes on: present or past."""
  narrated = clause.tense in _PAST and clause.modal != "sollen"
  return "past" if narrated else "present"


def may_have_subordinate(built: Clause) -> bool:
  """Whether because makes sense: for what persons and animals do, and for their moods."""
  if not is_animate(built.subject) or built.cause:
    return False
  quality = built.objects[0] if built.objects else None
  moody = isinstance(quality, Quality) and quality.adjective.group in _NEED
  return moody or built.verb in VERBS or built.verb in CLAUSE_VERBS


def subordinate(dice: Dice, built: Clause, leads: bool = False) -> Link:
  """A subordinate clause with its conjunction, mostly about what the main clause speaks of.

  One that leads does not speak of the object, which is yet unknown.
  """
  scenic = _scenic(built)
  if not scenic or dice.chance(0.3):
    english, german = dice.weighted([(row[:2], row[2]) for row in _REASONS])
    return Link(SMALL_WORDS[english, german], "finite", reason(dice, built, leads))
  english, german, era = dice.weighted([((*row[:2], row[4]), row[3]) for row in scenic])
  return Link(SMALL_WORDS[english, german], "finite", scene(dice, built, era))


def _scenic(built: Clause) -> list[tuple]:
  """The conjunctions of time and condition that go with a main clause."""
  if built.verb not in _SCENES or built.negated or built.adverb or built.opener:
    return []
  kinds = ["past" if era_of(built) == "past" else "modal" if built.modal else built.tense]
  if "lasting" in built.verb.tags and not built.modal:
    kinds.append(f"lasting {kinds[0]}")
  return [row for row in _SCENIC if set(kinds) & set(row[2])]


def scene(dice: Dice, built: Clause, era: str) -> Clause:
  """What happens meanwhile, before or after, to the same subject or another."""
  reference = pronoun_for(built.subject) if dice.chance(0.45) else None
  verbs = [verb for verb in verbs_with(built.subject) if verb in _SCENES and verb is not built.verb]
  if reference is None or not verbs:
    return setting(dice, _scene_besides(dice, built, era))
  return setting(dice, bare_clause(dice, subject=reference, verb=dice.pick(verbs), era=era))


def _scene_besides(dice: Dice, built: Clause, era: str) -> Clause:
  """What happens to another: no he or she, which would confuse, nor the same noun again."""
  inner = bare_clause(dice, verb=dice.pick(_ALL_SCENES), era=era)
  same = isinstance(inner.subject, NounPhrase) and inner.subject.noun is noun_of(built.subject)
  if same or isinstance(inner.subject, Pronoun):
    verb = dice.pick(_PERSON_SCENES)
    return bare_clause(dice, subject=new_person(dice), verb=verb, era=era)
  return inner


def reason(dice: Dice, built: Clause, leads: bool = False) -> Clause:
  """Why: how the subject or the object is, the weather, or what the subject does."""
  tense, subject, item = era_of(built), built.subject, None if leads else the_object(built)
  roll = dice.weighted((("subject", 33), ("object", 33), ("deed", 28), ("weather", 6)))
  if roll == "weather":
    return bad_weather(dice, "past" if tense == "past" else "progressive")
  if built.verb not in VERBS and built.objects:
    return deed(dice, subject, "past" if tense == "past" else "completed")
  if roll == "object" and item and not _is_confusing(item, subject) and _fitting(item, _MERIT):
    return _described(dice, tense, item, _MERIT)
  groups = _NEED if "hunger" in built.verb.tags else _MOOD
  if roll != "deed" and _fitting(subject, groups):
    return _described(dice, tense, subject, groups)
  return deed(dice, subject, tense, built.verb)


def _described(dice: Dice, tense: str, node: Nominal, groups: tuple[str, ...]) -> Clause:
  """How somebody or something known is."""
  reference, noun = pronoun_for(node), noun_of(node)
  assert reference and noun, f"nothing takes up {node}"
  return described(dice, tense, reference, noun, groups, said_of(node))


def said_of(node: Nominal) -> tuple[Quality, ...]:
  """The adjectives of a noun phrase."""
  return node.qualities if isinstance(node, NounPhrase) else ()


def _fitting(node: Nominal, groups: tuple[str, ...]) -> bool:
  """Whether an adjective of the groups can be said of the pronoun for a nominal."""
  noun = noun_of(node) if pronoun_for(node) else None
  if noun is None:
    return False
  return any(not contradicts(a, said_of(node)) for a in adjectives_of(noun, groups))


def deed(
  dice: Dice, antecedent: Nominal, era: str, other: Verb | None = None, embedded: bool = True
) -> Clause:
  """A clause about an antecedent, taken up by a pronoun; else about somebody new."""
  reference = pronoun_for(antecedent)
  barred = _STATES if era == "completed" else (other,)
  verbs = [verb for verb in verbs_with(antecedent) if verb not in barred] if reference else []
  verb = dice.pick(verbs) if verbs else None
  subject = reference if verbs else new_person(dice)
  if embedded and dice.chance(0.6):
    return setting(dice, bare_clause(dice, subject=subject, verb=verb, era=era))
  return clause(dice, subject=subject, verb=verb, era=era, embedded=embedded)


def _is_confusing(item: NounPhrase, subject: Nominal) -> bool:
  """Whether the pronoun for the object might as well be that of the subject."""
  first, second = pronoun_for(item), pronoun_for(subject)
  return first is None or second is None or first.english == second.english


def the_object(built: Clause) -> NounPhrase | None:
  """The one thing or person beside the subject to which a pronoun can point."""
  phrases = [node.nominal for node in built.objects if isinstance(node, Phrase)]
  return phrases[0] if len(phrases) == 1 and isinstance(phrases[0], NounPhrase) else None
