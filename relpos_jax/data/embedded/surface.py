"""From words to text: commas, capitals, spaces."""

import re

from relpos_jax.data.embedded.english import clauses as english
from relpos_jax.data.embedded.german import clauses as german
from relpos_jax.data.embedded.tree import Sentence

_COMMAS = re.compile(r"( ,)+")


def pair(tree: Sentence) -> tuple[str, str]:
  """The English and the German sentence."""
  return text(english.sentence(tree)), text(german.sentence(tree))


def text(words: list[str]) -> str:
  """Joins words and punctuation; commas that meet are one, and none stands at the end.

  >>> text(["wenn", "es", "regnet", ",", ",", "aber", "ich", "schlafe", ",", "."])
  'Wenn es regnet, aber ich schlafe.'
  """
  *words, mark = words
  joined = _COMMAS.sub(",", " ".join(words)).rstrip(",").replace("can not", "cannot")
  return joined[0].upper() + joined[1:] + mark
