"""German phrases: nominals in their case, objects and adjuncts, without their relative clauses."""

from relpos_jax.data.embedded.german import nominals as forms
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


def nominal(node: Nominal, case: str) -> list[str]:
  """The words of a nominal in its case."""
  if isinstance(node, NounPhrase):
    return noun_phrase(node, case)
  if isinstance(node, Name):
    return [node.german + "s" if case == "G" else node.german]
  if isinstance(node, Group):
    return enumerate_members([nominal(member, case) for member in node.members], node.joint.german)
  if isinstance(node, Relative):
    return [forms.RELATIVES["p" if node.plural else node.gender][forms.CASES.index(case)]]
  key = node.english if node.english in forms.PRONOUNS else node.gender
  return [forms.PRONOUNS[key][forms.CASES.index(case)]]


def enumerate_members(members: list[list[str]], joint: str) -> list[str]:
  """A, B and C, in either language.

  >>> enumerate_members([["A"], ["B"], ["C"]], "und")
  ['A', ',', 'B', 'und', 'C']
  """
  words = members[0]
  for member in members[1:-1]:
    words = [*words, ",", *member]
  return [*words, joint, *members[-1]]


def noun_phrase(node: NounPhrase, case: str) -> list[str]:
  """Determiner, number, adjectives and noun: der Hund des Lehrers, Annas Hund, dessen Hund."""
  gender = "p" if node.plural else node.noun.gender
  owner = nominal(node.owner, "G") if node.owner else []
  owner_first = isinstance(node.owner, Name | Relative)
  determiner = None if owner_first else node.determiner
  words = owner if determiner is None else forms.determiner_form(determiner, gender, case).split()
  if node.number:
    words = [*words, forms.number_word(node.number)]
  words = [*words, *qualities(node, forms.adjective_ending(determiner, gender, case))]
  words.append(forms.noun_form(node.noun, case, node.plural))
  return words if owner_first else words + owner


def qualities(node: NounPhrase, ending: str) -> list[str]:
  """The attributive adjectives, with und between them where the phrase has it."""
  words = []
  for index, quality in enumerate(node.qualities):
    if index and node.joint:
      words.append(node.joint.german)
    if quality.degree:
      words.append(quality.degree.german)
    words.append(forms.attributive_stem(quality.adjective.german) + ending)
  return words


def part(node: Part) -> list[str]:
  """The words of an object, a predicate or an adjunct."""
  if isinstance(node, Pair):
    return [node.german]
  if isinstance(node, Quality):
    return [*([node.degree.german] if node.degree else []), node.adjective.german]
  if isinstance(node, Comparison):
    return [*_compared(node), *nominal(node.standard, "N")]
  words = nominal(node.nominal, node.case)
  if not node.german:
    return words
  # Only the plain article merges: im Haus, but in dem Haus, das ... and das Haus, in dem ...
  plain = isinstance(node.nominal, NounPhrase) and node.nominal.relative is None
  return forms.contract(node.german, words) if plain else [node.german, *words]


def _compared(node: Comparison) -> list[str]:
  if node.equal:
    return ["so", node.adjective.german, "wie"]
  return [node.adjective.comparative, "als"]


def is_definite(node: Nominal) -> bool:
  """Known things stand before an adverb or nicht, new ones after."""
  if isinstance(node, Group):
    return all(is_definite(member) for member in node.members)
  if not isinstance(node, NounPhrase) or node.owner:
    return True
  determiner = node.determiner
  return determiner.declension in ("definite", "dieser") or determiner.german not in _INDEFINITE


_INDEFINITE = ("", "ein", "kein", "viel", "einig", "wie viel")
