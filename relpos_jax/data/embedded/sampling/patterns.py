"""Random clauses around to be: descriptions, jobs, whereabouts, there is, comparisons; weather."""

from dataclasses import replace

from relpos_jax.data.embedded.lexicon import (
  ADJECTIVES,
  ADVERBS,
  DETERMINERS,
  NOUNS,
  Noun,
  Verb,
  nouns_of,
)
from relpos_jax.data.embedded.sampling.adjuncts import (
  pick_time,
  place_phrase,
  spot_phrase,
  tagged,
)
from relpos_jax.data.embedded.sampling.clauses import clause, negated
from relpos_jax.data.embedded.sampling.dice import Dice
from relpos_jax.data.embedded.sampling.nominals import name, nominal, noun_phrase
from relpos_jax.data.embedded.sampling.qualities import (
  adjectives_of,
  attributes,
  contradicts,
  degree,
)
from relpos_jax.data.embedded.tables.words import GROUPS
from relpos_jax.data.embedded.tree import (
  Clause,
  Comparison,
  Name,
  Nominal,
  NounPhrase,
  Phrase,
  Pronoun,
  Quality,
)

BE = Verb("be", "sein", "sein")
BECOME = Verb("become", "werden", "sein")
GIBT = Verb("be", "geben")
WEATHER = (Verb("rain", "regnen"), Verb("snow", "schneien"))
_PERSONS = nouns_of("person")
_CITIZENS = nouns_of("kin mate man woman customer guest tourist")
_DESCRIBED = tuple(noun for noun in NOUNS if adjectives_of(noun))
_COMPARED = tuple(adjective for adjective in ADJECTIVES if adjective.comparative)
_SPOTS = "furniture container tree"
_SIGHTS = (("tables shop building", "town island"), ("plant animal", "outdoors"))
_MEETING_PLACES = "public outdoors room shop workplace"


def simple(dice: Dice, era: str = "any", embedded: bool = False) -> Clause:
  """A random clause of any make that holds no other clause."""
  pattern = dice.weighted(_PATTERNS)
  if pattern is None:
    return clause(dice, era=era, embedded=embedded)
  built = pattern(dice, copula_tense(dice, era))
  return replace(built, front="subject") if embedded else built


def copula_tense(dice: Dice, era: str) -> str:
  """Present or past, as the era allows."""
  if era == "any":
    return "past" if dice.chance(0.3) else "present"
  return "past" if "past" in era or era == "pluperfect" else "present"


def description(dice: Dice, tense: str) -> Clause:
  """Something is such: the house is very old."""
  noun = dice.pick(_PERSONS if dice.chance(0.4) else _DESCRIBED)
  subject = replace(noun_phrase(dice, noun, definite=True), qualities=(), joint=None)
  return described(dice, tense, subject, noun)


def described(
  dice: Dice,
  tense: str,
  subject: Nominal,
  noun: Noun,
  groups: tuple[str, ...] = GROUPS,
  said: tuple[Quality, ...] = (),
) -> Clause:
  """A subject with a predicate adjective that goes with the noun and is not yet said."""
  found = [a for a in adjectives_of(noun, groups) if not contradicts(a, said)]
  adjective = dice.pick(found or adjectives_of(noun, groups))
  quality = Quality(adjective, degree(dice, adjective, predicate=True))
  built = Clause(subject, BE, (quality,), tense)
  if quality.degree is None and groups is GROUPS and dice.chance(0.15):
    return negated(built)
  passing = adjective.group in ("mood", "need")
  if passing and dice.chance(0.25):
    return replace(built, adverb=dice.pick(tagged(ADVERBS, "past" if tense == "past" else "habit")))
  if passing and dice.chance(0.25):
    timed = built if tense == "past" else replace(built, tense="progressive")
    return replace(built, time=pick_time(dice, timed))
  return built


def profession(dice: Dice, tense: str) -> Clause:
  """Someone is something: my brother is a teacher, ist Lehrer; is a good teacher."""
  noun = dice.pick(_CITIZENS)
  subject = name(dice) if dice.chance(0.5) else noun_phrase(dice, noun, definite=True)
  female = (subject.gender if isinstance(subject, Name) else subject.noun.gender) == "f"
  job = dice.pick([noun for noun in nouns_of("job") if (noun.gender == "f") == female])
  plural = isinstance(subject, NounPhrase) and subject.plural
  objects = (Phrase("", "", "N", _job_phrase(dice, job, plural)),)
  if dice.chance(0.3):
    return Clause(subject, BECOME, objects, "present", dice.pick(("wollen", "möchten")))
  built = Clause(subject, BE, objects, tense)
  return negated(built) if dice.chance(0.15) else built


def _job_phrase(dice: Dice, job: Noun, plural: bool) -> NounPhrase:
  """German names a job without an article, unless an adjective comes before it."""
  quality = Quality(dice.pick(adjectives_of(job, ("quality",))))
  qualities = (quality,) if dice.chance(0.4) else ()
  article = "zero" if plural else "a" if qualities else "a, bare"
  return NounPhrase(job, DETERMINERS[article], plural, 0, qualities)


def whereabouts(dice: Dice, tense: str) -> Clause:
  """Somebody or something is somewhere."""
  if dice.chance(0.5):
    subject = nominal(dice, "person")
    place = place_phrase(dice, dice.pick(nouns_of(_MEETING_PLACES)), "place", subject)
  else:
    subject, place = nominal(dice, "item", definite=True), spot_phrase(dice, _SPOTS)
  built = Clause(subject, BE, (place,), tense)
  return negated(built) if dice.chance(0.15) else built


def existence(dice: Dice, tense: str) -> Clause:
  """There is something somewhere: es gibt with the accusative."""
  if dice.chance(0.5):
    noun, place = dice.pick(nouns_of("item")), spot_phrase(dice, _SPOTS)
  else:
    things, places = dice.pick(_SIGHTS)
    noun = dice.pick(nouns_of(things))
    place = place_phrase(dice, dice.pick(nouns_of(places)), "place")
  plural = dice.chance(0.35)
  kinds = (("no", 15), *((("zero", 30), ("many", 25), ("some", 20)) if plural else (("a", 85),)))
  phrase = NounPhrase(noun, DETERMINERS[dice.weighted(kinds)], plural, 0, *attributes(dice, noun))
  front = "place" if dice.chance(0.4) else "subject"
  objects = (Phrase("", "", "A", phrase),)
  return Clause(Pronoun("there", "n"), GIBT, objects, tense, place=place, front=front)


def comparison(dice: Dice, tense: str) -> Clause:
  """One thing is bigger than another, or as big as it."""
  adjective = dice.pick(_COMPARED)
  nouns = nouns_of(dice.pick(sorted(adjective.classes)))
  first, second = dice.pick(nouns), dice.pick(nouns)
  if first is second:
    return comparison(dice, tense)
  subject, standard = (
    replace(noun_phrase(dice, noun, definite=True), qualities=(), joint=None)
    for noun in (first, second)
  )
  return Clause(subject, BE, (Comparison(adjective, dice.chance(0.3), standard),), tense)


def bad_weather(dice: Dice, tense: str) -> Clause:
  """It is raining."""
  return Clause(Pronoun("it", "n"), dice.pick(WEATHER), tense=tense)


def weather(dice: Dice, tense: str) -> Clause:
  """It is raining, it will snow, somewhere or some time."""
  tense = "past" if tense == "past" else dice.pick(("progressive", "future"))
  built = bad_weather(dice, tense)
  if dice.chance(0.5):
    return replace(built, time=pick_time(dice, built))
  noun = dice.pick(nouns_of("town woods island mountain street"))
  return replace(built, place=place_phrase(dice, noun, "place"))


# None is a clause of any verb.
_PATTERNS = (
  (None, 76),
  (description, 10),
  (profession, 3),
  (whereabouts, 4),
  (existence, 3),
  (comparison, 3),
  (weather, 1),
)
