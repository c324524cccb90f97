"""The abstract syntax: what a sentence says, before English or German put it in order.

A tree holds lexemes and relations only. `english` and `german` each turn the same tree into words:
that makes the grammar synchronous and every pair a translation.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

from relpos_jax.data.embedded.lexicon import Adjective, Determiner, Noun, Pair, Verb

NO_WORDS = Pair("", "")


@dataclass(frozen=True, eq=False, slots=True)
class Quality:
  """An adjective with a word of degree, attributive or predicative: very old, sehr alt."""

  adjective: Adjective
  degree: Pair | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Comparison:
  """A predicate that compares: older than my father, as old as my father."""

  adjective: Adjective
  equal: bool
  standard: "Nominal"


@dataclass(frozen=True, eq=False, slots=True)
class NounPhrase:
  """A noun with all that agrees with it. An owner takes the determiner's place."""

  noun: Noun
  determiner: Determiner
  plural: bool = False
  number: int = 0
  qualities: tuple[Quality, ...] = ()
  joint: Pair | None = None
  owner: "NounPhrase | Name | Relative | None" = None
  relative: "Clause | None" = None


@dataclass(frozen=True, eq=False, slots=True)
class Name:
  """A person or a place without an article."""

  english: str
  german: str
  gender: str = "n"


@dataclass(frozen=True, eq=False, slots=True)
class Pronoun:
  """A personal or interrogative pronoun.

  The noun is that of the antecedent, if it has one, and the gender that noun's in German.
  """

  english: str
  gender: str = "m"
  noun: Noun | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Relative:
  """A relative pronoun: it agrees with the noun before it and has the case of its own clause."""

  gender: str
  plural: bool
  human: bool


@dataclass(frozen=True, eq=False, slots=True)
class Group:
  """Coordinated noun phrases."""

  joint: Pair
  members: "tuple[NounPhrase | Name, ...]"


Nominal = NounPhrase | Name | Pronoun | Relative | Group


@dataclass(frozen=True, eq=False, slots=True)
class Phrase:
  """A nominal with its prepositions, either of which may be empty, and its German case."""

  english: str
  german: str
  case: str
  nominal: Nominal


Part = Phrase | Pair | Quality | Comparison


@dataclass(frozen=True, eq=False, slots=True)
class Link:
  """A clause that depends on another: the two conjunctions, and how its verb stands.

  The form is `finite` (verb last), `infinitive` (zu with to) or `gerund` (zu with -ing).
  """

  words: Pair
  form: str
  clause: "Clause"


@dataclass(frozen=True, eq=False, slots=True)
class Clause:
  """A subject and a verb with everything around them.

  `front` names what opens the clause: subject, time, cause, manner, place, opener, or a place in
  `objects` as "0", "1"; it is empty where the finite verb comes first. `lead` is a subordinate
  clause that opens the sentence, `link` one that closes it, `also` are further verb phrases of the
  same subject.
  """

  subject: Nominal
  verb: Verb
  objects: tuple[Part, ...] = ()
  tense: str = "present"
  modal: str = ""
  negated: bool = False
  adverb: Pair | None = None
  time: Pair | None = None
  cause: Part | None = None
  manner: Part | None = None
  place: Part | None = None
  opener: Pair | None = None
  front: str = "subject"
  question: bool = False
  lead: Link | None = None
  link: Link | None = None
  joint: Pair = NO_WORDS
  also: "tuple[Clause, ...]" = ()


@dataclass(frozen=True, eq=False, slots=True)
class Sentence:
  """Main clauses with the conjunctions before all but the first, and the closing mark."""

  clauses: tuple[Clause, ...]
  joints: tuple[Pair, ...] = ()
  mark: str = "."


_PERSONS = {"I": "1s", "you": "2s", "we": "1p", "they": "3p"}


def person(nominal: Nominal) -> str:
  """Person and number, for the verb to agree with: 1s, 2s, 3s, 1p or 3p."""
  if isinstance(nominal, Pronoun):
    return _PERSONS.get(nominal.english, "3s")
  if isinstance(nominal, Group):
    return "3p"
  return "3p" if isinstance(nominal, NounPhrase | Relative) and nominal.plural else "3s"


def constituent(clause: Clause, name: str) -> "Nominal | Part | None":
  """The part of a clause that `front` names."""
  return clause.objects[int(name)] if name.isdigit() else getattr(clause, name)


def walk(node: object) -> Iterator[object]:
  """Yields the node and everything below it, lexemes included."""
  yield node
  if isinstance(node, tuple):
    for child in node:
      yield from walk(child)
  elif is_dataclass(node) and type(node).__module__ == __name__:
    for field in fields(node):
      yield from walk(getattr(node, field.name))
