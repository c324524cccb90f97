"""What takes a nominal up again: its pronoun and possessive, and the noun that it is about."""

from relpos_jax.data.embedded.german.phrases import is_definite
from relpos_jax.data.embedded.lexicon import DETERMINERS, Noun, nouns_of
from relpos_jax.data.embedded.tree import Group, Name, Nominal, NounPhrase, Pronoun, Relative

PERSONAL = ("I", "you", "he", "she", "we", "they")
_POSSESSIVES = {"I": "my", "you": "your", "we": "our", "they": "their", "he": "his", "she": "her"}
_ANYBODY = nouns_of("neighbour")[0]
# No pronoun takes these up: every dog, no dog, (plays) the piano.
_POINTLESS = tuple(DETERMINERS[key] for key in ("every", "no", "any", "how many", "the, bare"))


def own_possessive(subject: Nominal | None) -> str | None:
  """His, her, its or their, or of a pronoun its own; None for das Kind, das Mädchen."""
  if isinstance(subject, Pronoun) and subject.english in _POSSESSIVES:
    return _POSSESSIVES[subject.english]
  reference = pronoun_for(subject)
  if reference is None:
    return None
  if reference.english == "it":
    return "its, feminine" if reference.gender == "f" else "its"
  return _POSSESSIVES.get(reference.english)


def pronoun_for(node: Nominal | None) -> Pronoun | None:
  """The pronoun that takes a nominal up again, in German by grammatical gender.

  None where the languages part (the girl, she; das Mädchen, es) or nothing is meant: no dog.
  """
  if isinstance(node, Pronoun):
    return node if node.noun or node.english in PERSONAL else None
  if isinstance(node, Group):
    return Pronoun("they")
  if isinstance(node, Name):
    return Pronoun("she" if node.gender == "f" else "he", node.gender)
  if not isinstance(node, NounPhrase) or node.determiner in _POINTLESS:
    return None
  noun = node.noun
  if node.plural:
    return Pronoun("they", noun=noun)
  if not noun.classes & {"person", "baby"}:
    return Pronoun("it", noun.gender, noun)
  english = {"m": "he", "f": "she"}.get(noun.gender)
  return Pronoun(english, noun.gender, noun) if english else None


def noun_of(node: Nominal) -> Noun | None:
  """The noun by which to choose verbs and adjectives; for names, I and you that of a person."""
  if isinstance(node, NounPhrase | Pronoun) and node.noun:
    return node.noun
  nobody = isinstance(node, Relative) or (isinstance(node, Pronoun) and node.english == "there")
  return None if nobody or getattr(node, "english", "") == "it" else _ANYBODY


def is_person(node: Nominal) -> bool:
  """Whether a nominal is of persons."""
  noun = noun_of(node)
  return noun is not None and "person" in noun.classes


def is_animate(node: Nominal) -> bool:
  """Whether a nominal is of persons or animals; there and it, in it rains, are not."""
  noun = noun_of(node)
  return noun is not None and bool(noun.classes & {"person", "animal", "baby"})


def is_known(node: Nominal) -> bool:
  """Whether it is definite and not every or all of them: what can be negated about."""
  quantified = isinstance(node, NounPhrase) and node.determiner.german in ("jed", "all")
  return is_definite(node) and not quantified
