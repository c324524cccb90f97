"""English inflection: verbs, nouns, the article, comparatives, numbers."""

import re
from functools import cache

# base, past, participle where they are not regular
IRREGULAR = """
be was been
begin began begun
bite bit bitten
break broke broken
bring brought brought
build built built
burn burned burned
buy bought bought
can could -
catch caught caught
choose chose chosen
come came come
cut cut cut
do did done
draw drew drawn
drink drank drunk
drive drove driven
eat ate eaten
fall fell fallen
feed fed fed
fight fought fought
find found found
fly flew flown
forget forgot forgotten
forgive forgave forgiven
get got got
give gave given
go went gone
grow grew grown
hang hung hung
have had had
hear heard heard
hide hid hidden
know knew known
lay laid laid
leave left left
lend lent lent
lie lay lain
lose lost lost
meet met met
pay paid paid
put put put
read read read
ride rode ridden
run ran run
say said said
see saw seen
sell sold sold
send sent sent
shine shone shone
show showed shown
sing sang sung
sit sat sat
sleep slept slept
speak spoke spoken
stand stood stood
steal stole stolen
swim swam swum
take took taken
teach taught taught
tell told told
think thought thought
throw threw thrown
understand understood understood
wake woke woken
wear wore worn
win won won
write wrote written
"""
_FORMS = {row.split()[0]: row.split()[1:] for row in IRREGULAR.strip().splitlines()}
# Verbs of two syllables that double their last letter, as get and stop do.
_DOUBLING = ("begin", "forget", "travel")
_BE = {"1s": ("am", "was"), "3s": ("is", "was")}
_ONES = [
  "zero",
  "one",
  "two",
  "three",
  "four",
  "five",
  "six",
  "seven",
  "eight",
  "nine",
  "ten",
  "eleven",
  "twelve",
  "thirteen",
  "fourteen",
  "fifteen",
  "sixteen",
  "seventeen",
  "eighteen",
  "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_COMPARATIVES = {"good": "better", "bad": "worse"}


@cache
def conjugate(verb: str, person: str, past: bool = False) -> str:
  """The finite form of one word: goes, was, carried."""
  if verb == "be":
    return _BE.get(person, ("are", "were"))[past]
  if past:
    return _FORMS[verb][0] if verb in _FORMS else _regular_past(verb)
  return third_person(verb) if person == "3s" else verb


@cache
def third_person(verb: str) -> str:
  """Adds s: carries, goes, has."""
  if verb == "have":
    return "has"
  if verb.endswith(("s", "x", "ch", "sh", "o")):
    return verb + "es"
  if re.search(r"[^aeiou]y$", verb):
    return verb[:-1] + "ies"
  return verb + "s"


@cache
def participle(verb: str) -> str:
  """The past participle: gone, carried."""
  return _FORMS[verb][1] if verb in _FORMS else _regular_past(verb)


def is_past_ambiguous(verb: str) -> bool:
  """Whether past and present are one word, as in they put, they read."""
  return verb in _FORMS and _FORMS[verb][0] == verb


@cache
def gerund(verb: str) -> str:
  """The -ing form: lying, making, getting."""
  if verb.endswith("ie"):
    return verb[:-2] + "ying"
  if verb.endswith("e") and not verb.endswith("ee") and verb != "be":
    return verb[:-1] + "ing"
  return _doubled(verb) + "ing"


def _regular_past(verb: str) -> str:
  if re.search(r"[^aeiou]y$", verb):
    return verb[:-1] + "ied"
  return verb + "d" if verb.endswith("e") else _doubled(verb) + "ed"


def _doubled(verb: str) -> str:
  """Doubles the last consonant of stop, get and begin, but not of open, wait or show."""
  one_syllable = re.fullmatch(r"[^aeiou]*[aeiou][^aeiouwxy]", verb)
  return verb + verb[-1] if one_syllable or verb in _DOUBLING else verb


@cache
def comparative(adjective: str) -> str | None:
  """The comparative of one word (older, happier); None where English says more."""
  if adjective in _COMPARATIVES:
    return _COMPARATIVES[adjective]
  syllables = len(re.findall(r"[aeiouy]+", adjective.removesuffix("e")))
  if syllables > 1 and adjective.endswith("y"):
    return adjective[:-1] + "ier"
  if syllables > 1 and adjective not in ("clever", "quiet"):
    return None
  return (
    adjective.removesuffix("e") + "er" if adjective.endswith("e") else _doubled(adjective) + "er"
  )


def article(following: str) -> str:
  """The indefinite article, by the sound that follows: an honest man, a university."""
  return "an" if following[0] in "aeiou" or following == "honest" else "a"


@cache
def number_word(number: int) -> str:
  """A number from 1 to 99: twenty-one."""
  if number < 20:
    return _ONES[number]
  tens, ones = divmod(number, 10)
  return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
