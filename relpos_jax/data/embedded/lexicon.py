"""The lexicon: the word tables as records, and nouns by class of meaning."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from relpos_jax.data.embedded.tables import nouns, verbs, words


@dataclass(frozen=True, eq=False, slots=True)
class Pair:
  """An English word or phrase and its German one; the tags say where it may stand."""

  english: str
  german: str
  tags: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Noun:
  """German nominative, genitive and plural; no plural is an empty string."""

  english: str
  english_plural: str
  german: str
  gender: str
  genitive: str
  german_plural: str
  classes: frozenset[str]
  place: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
  """An object a verb takes: `marking` is a German case, preposition+case, or a kind of place."""

  english: str
  marking: str
  classes: str
  optional: bool


@dataclass(frozen=True, eq=False, slots=True)
class Verb:
  """German as in the table (auf-stehen, ver=kaufen), without `sich` and `*`."""

  english: str
  german: str
  auxiliary: str = "haben"
  reflexive: bool = False
  subject: str = "person"
  slots: tuple[Slot, ...] = ()
  tags: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False, slots=True)
class Adjective:
  """The German comparative is empty where one does not compare."""

  english: str
  german: str
  classes: frozenset[str]
  group: str
  comparative: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Determiner:
  """A plural or singular of "-" does not exist."""

  english: str
  english_plural: str
  german: str
  declension: str


def rows(table: str) -> Iterator[list[str]]:
  """Yields the stripped cells of each line.

  >>> list(rows('''
  ... cat/cats | die Katze
  ... '''))
  [['cat/cats', 'die Katze']]
  """
  for line in table.strip().splitlines():
    yield [cell.strip() for cell in line.split("|")]


def plural(noun: str) -> str:
  """The regular English plural: box, boxes; baby, babies; cat, cats."""
  if noun.endswith(("s", "x", "ch", "sh")):
    return noun + "es"
  if noun.endswith("y") and noun[-2] not in "aeiou":
    return noun[:-1] + "ies"
  return noun + "s"


def noun(english: str, german: str, classes: str, place: str = "") -> Noun:
  """Reads a line of the nouns: das Haus -es Häuser."""
  singular, _, irregular = english.partition("/")
  article, lemma, *forms = german.split()
  ending = forms.pop(0)[1:] if forms and forms[0].startswith("-") else ""
  return Noun(
    singular,
    irregular or plural(singular),
    lemma,
    {"der": "m", "die": "f", "das": "n"}[article],
    lemma + ("n" if ending == "en" and lemma.endswith("e") else ending),
    forms[0] if forms else "",
    frozenset([*classes.split(), singular]),
    place,
  )


def slot(text: str) -> Slot:
  """Reads an object of a verb: for>auf+A:person ride?, for which one waits."""
  text, optional = (text[:-1], True) if text.endswith("?") else (text, False)
  marking, _, classes = text.partition(":")
  english, _, marking = marking.rpartition(">")
  return Slot(english, marking, classes, optional)


def verb(english: str, german: str, subject: str, slots: str = "", tags: str = "") -> Verb:
  """Reads a line of the verbs."""
  reflexive = german.startswith("sich ")
  return Verb(
    english,
    german.removeprefix("sich ").removesuffix("*"),
    "sein" if german.endswith("*") else "haben",
    reflexive,
    subject,
    tuple(slot(text.strip()) for text in slots.split(",") if text),
    frozenset(tags.split()),
  )


def pairs(table: str) -> tuple[Pair, ...]:
  """Reads a table of pairs; a third column is their tags."""
  return tuple(Pair(row[0], row[1], tuple(" ".join(row[2:]).split())) for row in rows(table))


NOUNS = tuple(noun(*row) for row in rows(nouns.NOUNS))
VERBS = tuple(verb(*row) for row in rows(verbs.VERBS))
CLAUSE_VERBS = tuple(
  verb(english, german, "person", tags=kinds + " " + tags)
  for english, german, kinds, tags in rows(verbs.CLAUSE_VERBS)
)
ADJECTIVES = tuple(
  Adjective(english, german, frozenset(classes.split()), *rest)
  for english, german, classes, *rest in rows(words.ADJECTIVES)
)
DETERMINERS = {key: Determiner(*row) for key, *row in rows(words.DETERMINERS)}
PLACES = {name: row for name, *row in rows(words.PLACES)}
MANNERS = pairs(words.MANNERS)
TIMES = pairs(words.TIMES)
ADVERBS = pairs(words.ADVERBS)
OPENERS = pairs(words.OPENERS)
UNITS = pairs(words.UNITS)
SPOTS = pairs(words.SPOTS)
CAUSES = pairs(words.CAUSES)
NAMES = pairs(words.NAMES)
TOWNS = pairs(words.TOWNS)
SMALL_WORDS = {(pair.english, pair.german): pair for pair in pairs(words.SMALL_WORDS)}


@cache
def names(classes: str) -> tuple[str, ...]:
  """The classes of meaning, which are written with spaces between."""
  return tuple(classes.split())


@cache
def nouns_of(classes: str) -> tuple[Noun, ...]:
  """The nouns in at least one of the classes, named with spaces; a noun's own word is a class.

  >>> [noun.german for noun in nouns_of("kin hero")][-3:]
  ['Tante', 'Sohn', 'Tochter']
  """
  wanted = frozenset(classes.split())
  return tuple(noun for noun in NOUNS if noun.classes & wanted)


def lemmas() -> set[tuple[str, str]]:
  """The English-German pairs of the whole lexicon; a verb's objects do not make it another."""
  entries = (*NOUNS, *VERBS, *CLAUSE_VERBS, *ADJECTIVES)
  entries += (*MANNERS, *TIMES, *ADVERBS, *OPENERS, *SPOTS, *CAUSES)
  found = {(entry.english, entry.german) for entry in entries}
  found |= {(entry.english, entry.german) for entry in DETERMINERS.values() if entry.german}
  return found | set(SMALL_WORDS)
