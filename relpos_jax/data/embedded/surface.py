"""From words to text: commas, capitals, spaces."""

from relpos_jax.data.embedded.english import clauses as english
from relpos_jax.data.embedded.german import clauses as german
from relpos_jax.data.embedded.tree import Sentence

_MARKS = (".", "?")


def pair(tree: Sentence) -> tuple[str, str]:
  """The English and the German sentence."""
  return text(english.sentence(tree)), text(german.sentence(tree))


def text(words: list[str]) -> str:
  """Joins words and punctuation; a comma gives way to another mark and to the sentence's start.

  >>> text([",", "wenn", "es", "regnet", ",", ",", "aber", "ich", "schlafe", ",", "."])
  'Wenn es regnet, aber ich schlafe.'
  """
  parts: list[str] = []
  for word, following in zip(words, [*words[1:], ""], strict=True):
    if word == "," and (not parts or following == "," or following in _MARKS):
      continue
    parts.append(word if word == "," or word in _MARKS or not parts else " " + word)
  joined = "".join(parts).replace("can not", "cannot")
  return joined[0].upper() + joined[1:]
