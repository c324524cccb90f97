"""Random dependent clauses: subordinate clauses, infinitives, the content of what is said."""

from dataclasses import replace

from relpos_jax.data.embedded.lexicon import CLAUSE_VERBS, SMALL_WORDS, VERBS, Pair, Verb
from relpos_jax.data.embedded.sampling.adjuncts import pick_manner, pick_place, pick_time
from relpos_jax.data.embedded.sampling.clauses import (
  PERSON_VERBS,
  bare_clause,
  clause,
  deeds_besides,
  negated,
  pick_tense,
  verbs_with,
)
from relpos_jax.data.embedded.sampling.dice import Dice
from relpos_jax.data.embedded.sampling.gaps import w_question
from relpos_jax.data.embedded.sampling.nominals import name, new_person, nominal, pronoun_for
from relpos_jax.data.embedded.sampling.patterns import bad_weather, described
from relpos_jax.data.embedded.sampling.qualities import adjectives_of
from relpos_jax.data.embedded.tree import (
  Clause,
  Link,
  Nominal,
  NounPhrase,
  Phrase,
  Pronoun,
  Quality,
)

NO_WORDS = Pair("", "")
_PAST = ("past", "past progressive", "pluperfect")
_STATES = frozenset(verb for verb in VERBS if "state" in verb.tags)
_SCENES = tuple(verb for verb in VERBS if not verb.tags & {"state", "chance"})
_SCENIC_VERBS = frozenset(_SCENES)
_MOOD, _MERIT = ("mood",), ("quality", "size")

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
  moody = isinstance(quality, Quality) and quality.adjective.group == "mood"
  return moody or built.verb in VERBS or built.verb in CLAUSE_VERBS


def is_animate(node: Nominal) -> bool:
  """Whether a nominal is of persons or animals; there and it are not."""
  if isinstance(node, NounPhrase):
    return bool(node.noun.classes & {"person", "animal", "baby"})
  return not isinstance(node, Pronoun) or node.english not in ("it", "there")


def subordinate(dice: Dice, built: Clause) -> Link:
  """A subordinate clause with its conjunction, mostly about what the main clause speaks of."""
  scenic = _scenic(built)
  if not scenic or dice.chance(0.5):
    english, german = dice.weighted([(row[:2], row[2]) for row in _REASONS])
    return Link(SMALL_WORDS[english, german], "finite", reason(dice, built))
  english, german, era = dice.weighted([((*row[:2], row[4]), row[3]) for row in scenic])
  return Link(SMALL_WORDS[english, german], "finite", scene(dice, built, era))


def _scenic(built: Clause) -> list[tuple]:
  """The conjunctions of time and condition that go with a main clause."""
  if built.verb not in _SCENIC_VERBS or built.negated or built.adverb or built.opener:
    return []
  kinds = ["past" if era_of(built) == "past" else "modal" if built.modal else built.tense]
  if "lasting" in built.verb.tags and not built.modal:
    kinds.append(f"lasting {kinds[0]}")
  return [row for row in _SCENIC if set(kinds) & set(row[2])]


def scene(dice: Dice, built: Clause, era: str) -> Clause:
  """What happens meanwhile, before or after, to the same subject or another."""
  reference = pronoun_for(built.subject) if dice.chance(0.45) else None
  known = verbs_with(built.subject) if reference else PERSON_VERBS
  verbs = [verb for verb in known if verb in _SCENIC_VERBS and verb is not built.verb]
  subject = reference if reference and verbs else new_person(dice) if dice.chance(0.4) else None
  verb = dice.pick(verbs) if subject else dice.pick(_SCENES)
  inner = bare_clause(dice, subject=subject, verb=verb, era=era)
  if isinstance(inner.subject, Pronoun) and subject is None:
    inner = replace(inner, subject=name(dice))
  return _set(dice, inner)


def _set(dice: Dice, built: Clause) -> Clause:
  """Adds a manner or a place, but no time: the conjunction tells that."""
  manner = pick_manner(dice, built.verb) if dice.chance(0.15) else None
  place = pick_place(dice, built.verb, built.subject) if dice.chance(0.25) else None
  return replace(built, manner=manner, place=place)


def reason(dice: Dice, built: Clause) -> Clause:
  """Why: how the subject or the object is, the weather, or what the subject does."""
  tense, subject, item = era_of(built), built.subject, the_object(built)
  roll = dice.weighted((("subject", 33), ("object", 33), ("deed", 28), ("weather", 6)))
  if roll == "weather":
    return bad_weather(dice, "past" if tense == "past" else "progressive")
  if built.verb not in VERBS and built.objects:
    return deed(dice, subject, "past" if tense == "past" else "completed", embedded=True)
  if roll == "object" and item and _describable(item, _MERIT) and not _is_confusing(item, subject):
    return described(dice, tense, pronoun_for(item), item.noun, _MERIT, item.qualities)
  if roll != "deed" and _describable(subject, _MOOD):
    return described(dice, tense, pronoun_for(subject), subject.noun, _MOOD)
  return deed(dice, subject, tense, built.verb)


def _describable(node: Nominal, groups: tuple[str, ...]) -> bool:
  """Whether a pronoun for a noun phrase can have an adjective of the groups as its predicate."""
  known = isinstance(node, NounPhrase) and pronoun_for(node) is not None
  return known and bool(adjectives_of(node.noun, groups))


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
    return _set(dice, bare_clause(dice, subject=subject, verb=verb, era=era))
  return clause(dice, subject=subject, verb=verb, era=era, embedded=embedded)


def _is_confusing(item: NounPhrase, subject: Nominal) -> bool:
  """Whether the pronoun for the object might as well be that of the subject."""
  pronouns = pronoun_for(item), pronoun_for(subject)
  return None in pronouns or pronouns[0].english == pronouns[1].english


def the_object(built: Clause) -> NounPhrase | None:
  """The one thing or person beside the subject to which a pronoun can point."""
  phrases = [node.nominal for node in built.objects if isinstance(node, Phrase)]
  return phrases[0] if len(phrases) == 1 and isinstance(phrases[0], NounPhrase) else None


def purpose(dice: Dice, built: Clause) -> Link:
  """In order to, um zu; or without, ohne zu."""
  words = ("in order", "um") if dice.chance(0.8) else ("without", "ohne")
  form = "infinitive" if words[1] == "um" else "gerund"
  return Link(SMALL_WORDS[words], form, infinitive(dice, built))


def infinitive(dice: Dice, built: Clause) -> Clause:
  """What somebody wants to do: a clause whose verb stays in the infinitive."""
  inner = bare_clause(dice, subject=built.subject, verb=dice.pick(deeds_besides(built)))
  return _set(dice, replace(inner, tense="infinitive", modal=""))


def governing(dice: Dice, era: str, embedded: bool) -> Clause:
  """Someone says that, asks whether, knows where, tries to: a verb with a clause as its object."""
  verb = dice.pick(CLAUSE_VERBS)
  subject = nominal(dice, "person")
  tense, modal = pick_tense(dice, verb, subject, era)
  built = Clause(subject, verb, (), tense, modal)
  if not modal and verb.tags & {"that", "question"} and dice.chance(0.15):
    built = negated(built)
  if not built.negated and not embedded and dice.chance(0.12):
    time = pick_time(dice, built)
    built = replace(built, time=time, front="time") if time else built
  return built


def content_kind(dice: Dice, verb: Verb) -> str:
  """One of the kinds of clauses that a verb governs."""
  return dice.pick([kind for kind in _KINDS if kind in verb.tags])


_KINDS = ("that", "whether", "question", "zu", "gerund")


def infinite_content(dice: Dice, built: Clause, kind: str) -> Link:
  """Tries to open the door, stops opening the door: in German both are zu-infinitives."""
  form = "infinitive" if kind == "zu" else "gerund"
  return Link(NO_WORDS, form, infinitive(dice, built))


def asked_content(dice: Dice, built: Clause) -> Link:
  """Where she lives: an indirect question, verb last in German."""
  era = "past" if era_of(built) == "past" else "any"
  return Link(NO_WORDS, "finite", replace(w_question(dice, era), question=False))
