"""German declension: nouns, determiners, adjectives, pronouns, contractions, numbers.

Cases are N, A, D, G. Genders are m, f, n, and p for every plural.
"""

from functools import cache

from relpos_jax.data.embedded.lexicon import Determiner, Noun

CASES = "NADG"

# The endings of dieser by gender, in the order of CASES; ein and the adjectives build on them.
ENDINGS = {
  "m": ("er", "en", "em", "es"),
  "f": ("e", "e", "er", "er"),
  "n": ("es", "es", "em", "es"),
  "p": ("e", "e", "en", "er"),
}
ARTICLES = {
  "m": ("der", "den", "dem", "des"),
  "f": ("die", "die", "der", "der"),
  "n": ("das", "das", "dem", "des"),
  "p": ("die", "die", "den", "der"),
}
RELATIVES = {
  "m": ("der", "den", "dem", "dessen"),
  "f": ("die", "die", "der", "deren"),
  "n": ("das", "das", "dem", "dessen"),
  "p": ("die", "die", "denen", "deren"),
}
# nominative, accusative, dative
PRONOUNS = {
  "I": ("ich", "mich", "mir"),
  "you": ("du", "dich", "dir"),
  "we": ("wir", "uns", "uns"),
  "they": ("sie", "sie", "ihnen"),
  "m": ("er", "ihn", "ihm"),
  "f": ("sie", "sie", "ihr"),
  "n": ("es", "es", "ihm"),
  "who": ("wer", "wen", "wem"),
  "what": ("was", "was", "was"),
}
CONTRACTIONS = {
  ("in", "dem"): "im",
  ("in", "das"): "ins",
  ("an", "dem"): "am",
  ("an", "das"): "ans",
  ("von", "dem"): "vom",
  ("zu", "dem"): "zum",
  ("zu", "der"): "zur",
}
_ONES = [
  "null",
  "ein",
  "zwei",
  "drei",
  "vier",
  "fünf",
  "sechs",
  "sieben",
  "acht",
  "neun",
  "zehn",
  "elf",
  "zwölf",
]
_TENS = ["zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]
_TEENS = {16: "sechzehn", 17: "siebzehn"}


@cache
def noun_form(noun: Noun, case: str, plural: bool) -> str:
  """The noun in its case; the dative plural takes n, weak masculines have one oblique form."""
  if plural:
    form = noun.german_plural
    return form + "n" if case == "D" and not form.endswith(("n", "s")) else form
  if case == "G" or (case != "N" and is_weak(noun)):
    return noun.genitive
  return noun.german


def is_weak(noun: Noun) -> bool:
  """Weak declension: der Junge, des Jungen."""
  return noun.gender == "m" and noun.genitive.endswith("n") and noun.genitive != noun.german


@cache
def determiner_form(determiner: Determiner, gender: str, case: str) -> str:
  """The determiner in gender and case: diesem, keinen, unsere, viele."""
  column = CASES.index(case)
  if determiner.declension == "definite":
    return ARTICLES[gender][column]
  if determiner.declension == "bare" or _is_bare_ein(determiner, gender, case):
    return determiner.german
  return determiner.german + ENDINGS[gender][column]


def _is_bare_ein(determiner: Determiner, gender: str, case: str) -> bool:
  """Ein Mann, ein Kind: no ending, so the adjective shows the gender."""
  nominative = gender == "m" and case == "N"
  return determiner.declension == "ein" and (nominative or (gender == "n" and case in "NA"))


@cache
def adjective_ending(determiner: Determiner | None, gender: str, case: str) -> str:
  """Strong, where the determiner shows no gender and case; else weak. None is no determiner."""
  if determiner is None or determiner.declension in ("strong", "bare"):
    return "en" if case == "G" and gender in "mn" else ENDINGS[gender][CASES.index(case)]
  if _is_bare_ein(determiner, gender, case):
    return ENDINGS[gender][CASES.index(case)]
  return "e" if (case in "NA" and gender in "fn") or (case, gender) == ("N", "m") else "en"


@cache
def attributive_stem(adjective: str) -> str:
  """The stem that takes endings: hoh-, dunkl-, teur-, müd-."""
  if adjective == "hoch":
    return "hoh"
  if adjective.endswith("el") or adjective.endswith(("auer", "euer")):
    return adjective[:-2] + adjective[-1]
  return adjective.removesuffix("e")


def contract(preposition: str, words: list[str]) -> list[str]:
  """Joins preposition and article: in dem Haus, im Haus."""
  short = CONTRACTIONS.get((preposition, words[0]))
  return [short, *words[1:]] if short else [preposition, *words]


@cache
def number_word(number: int) -> str:
  """A number from 1 to 99: einundzwanzig."""
  tens, ones = divmod(number, 10)
  if number <= 12:
    return _ONES[number]
  if number < 20:
    return _TEENS.get(number, _ONES[ones] + "zehn")
  return (f"{_ONES[ones]}und" if ones else "") + _TENS[tens - 2]
