"""English phrases: nominals in their case, objects and adjuncts."""

from relpos_jax.data.embedded.english import forms
from relpos_jax.data.embedded.german.phrases import enumerate_members
from relpos_jax.data.embedded.lexicon import Pair
from relpos_jax.data.embedded.tree import (
  Comparison,
  Group,
  Name,
  Nominal,
  NounPhrase,
  Part,
  Quality,
  Relative,
)

_OBJECTS = {
  "I": "me",
  "he": "him",
  "she": "her",
  "we": "us",
  "they": "them",
  "who": "whom",
}


def nominal(node: Nominal, is_object: bool = False, after_preposition: bool = False) -> list[str]:
  """The words of a nominal; pronouns have an object form."""
  if isinstance(node, NounPhrase):
    return noun_phrase(node)
  if isinstance(node, Name):
    return [node.english]
  if isinstance(node, Group):
    return enumerate_members([nominal(member) for member in node.members], node.joint.english)
  if isinstance(node, Relative):
    return [_relative(node, is_object, after_preposition)]
  return [_OBJECTS.get(node.english, node.english) if is_object else node.english]


def _relative(node: Relative, is_object: bool, after_preposition: bool) -> str:
  """Who and whom for people; that for things, which after a preposition."""
  if node.human:
    return "whom" if is_object else "who"
  return "which" if after_preposition else "that"


def noun_phrase(node: NounPhrase) -> list[str]:
  """Determiner or owner, number, adjectives and noun."""
  noun = node.noun.english_plural if node.plural else node.noun.english
  words = [*([forms.number_word(node.number)] if node.number else []), *qualities(node), noun]
  if node.owner:
    return [*possessive(node.owner), *words]
  determiner = _determiner(node, words[0])
  return [determiner, *words] if determiner else words


def _determiner(node: NounPhrase, following: str) -> str:
  if node.plural:
    return node.determiner.english_plural
  if node.determiner.english != "a":
    return node.determiner.english
  # What is not counted has no indefinite article: any milk, beside a book.
  return forms.article(following) if node.noun.german_plural else "any"


def possessive(owner: NounPhrase | Name | Relative) -> list[str]:
  """The princess's, the teachers', the children's, Anna's, whose."""
  if isinstance(owner, Relative):
    return ["whose"]
  *words, last = nominal(owner)
  plural = isinstance(owner, NounPhrase) and owner.plural and last.endswith("s")
  return [*words, last + ("'" if plural else "'s")]


def qualities(node: NounPhrase) -> list[str]:
  """The attributive adjectives, with and between them where the phrase has it."""
  words = []
  for index, quality in enumerate(node.qualities):
    if index and node.joint:
      words.append(node.joint.english)
    words += part(quality)
  return words


def part(node: Part) -> list[str]:
  """The words of an object, a predicate or an adjunct."""
  if isinstance(node, Pair):
    return [node.english] if node.english else []
  if isinstance(node, Quality):
    return [*([node.degree.english] if node.degree else []), node.adjective.english]
  if isinstance(node, Comparison):
    return [*_compared(node), *nominal(node.standard)]
  is_object = node.case != "N"
  words = nominal(node.nominal, is_object, bool(node.english))
  return [node.english, *words] if node.english else words


def _compared(node: Comparison) -> list[str]:
  adjective = node.adjective.english
  if node.equal:
    return ["as", adjective, "as"]
  short = forms.comparative(adjective)
  return [short, "than"] if short else ["more", adjective, "than"]
