"""Random noun phrases, names and pronouns that make sense where they stand."""

from dataclasses import replace

from relpos_jax.data.embedded.lexicon import DETERMINERS, NAMES, SMALL_WORDS, Noun, names, nouns_of
from relpos_jax.data.embedded.sampling.dice import Dice
from relpos_jax.data.embedded.sampling.qualities import attributes
from relpos_jax.data.embedded.sampling.references import PERSONAL, is_person, own_possessive
from relpos_jax.data.embedded.tree import Group, Name, Nominal, NounPhrase, Pronoun

AND, OR = SMALL_WORDS["and", "und"], SMALL_WORDS["or", "oder"]

# Kinds of determiner by weight. "mine" is a possessive, "owner" a genitive, "number" a numeral.
_SINGULAR = (("the", 50), ("a", 26), ("this", 7), ("every", 2), ("mine", 10), ("owner", 5))
_PLURAL = (
  *(("the", 30), ("zero", 22), ("number", 14), ("this", 6), ("many", 8)),
  *(("some", 7), ("all", 5), ("mine", 7)),
)
_MASS = (("the", 40), ("zero", 50), ("this", 4), ("mine", 5))
_KIN = (("mine", 75), ("the", 10), ("owner", 15))
_PLACE = (("the", 82), ("a", 10), ("this", 6), ("mine", 8))
_INDEFINITE = ("a", "zero", "every", "number", "many", "some", "all", "no")
_OWNED = frozenset(["mate", "pet", "text", "item", "cloth", "gown", "vehicle", "own-place", "idea"])
_MY = (("my", 40), ("your", 15), ("our", 20), ("his", 13), ("her", 12))
_FIRST = ("I", "we")


def nominal(
  dice: Dice,
  classes: str,
  *,
  subject: Nominal | None = None,
  definite: bool = False,
  bare: bool = True,
) -> Nominal:
  """A random nominal of the classes.

  Args:
    subject: the subject of the clause, of which a possessive may remind; None for the subject.
    definite: only what is known: names, pronouns, the, this, my.
    bare: whether a plural may stand without an article, as no dative of German likes to.
  """
  if "person" in names(classes):
    roll = dice.weighted((("pronoun", 18), ("name", 12), ("group", 5), ("noun", 65)))
    if roll == "pronoun":
      return pronoun(dice, subject)
    if roll == "name":
      return name(dice, subject)
    if roll == "group":
      return group(dice, subject)
  noun = pick_noun(dice, classes)
  if isinstance(subject, NounPhrase) and noun is subject.noun:
    noun = pick_noun(dice, classes)
  phrase = noun_phrase(dice, noun, subject=subject, definite=definite)
  if bare or not phrase.plural or phrase.number or phrase.determiner is not DETERMINERS["zero"]:
    return phrase
  return replace(phrase, determiner=DETERMINERS["the"])


def pick_noun(dice: Dice, classes: str) -> Noun:
  """Half the time every class is equally likely, half the time every noun."""
  return dice.pick(nouns_of(dice.pick(names(classes)) if dice.chance(0.5) else classes))


def pronoun(dice: Dice, subject: Nominal | None) -> Pronoun:
  """A personal pronoun; as an object not that of the subject."""
  known = subject.english if isinstance(subject, Pronoun) else ""
  barred = _FIRST if known in _FIRST else (known,)
  english = dice.pick([word for word in PERSONAL if word not in barred])
  return Pronoun(english, "f" if english == "she" else "m")


def new_person(dice: Dice) -> Nominal:
  """Somebody to speak of besides: by name or as I, you or we, for he and she would confuse."""
  return name(dice) if dice.chance(0.5) else Pronoun(dice.pick(("I", "you", "we")))


def name(dice: Dice, other: Nominal | None = None) -> Name:
  """A first name, not that of another one."""
  pair = dice.pick(NAMES)
  if isinstance(other, Name) and other.english == pair.english:
    return name(dice, other)
  return Name(pair.english, pair.german, pair.tags[0])


def group(dice: Dice, subject: Nominal | None = None) -> Group:
  """Two persons joined by and."""
  if dice.chance(0.5):
    first, second = name(dice), name(dice)
    if first.english != second.english:
      return Group(AND, (first, second))
  nouns = [pick_noun(dice, "person"), pick_noun(dice, "person")]
  if nouns[0] is nouns[1]:
    return group(dice, subject)
  return Group(AND, tuple(plain_phrase(dice, noun, subject) for noun in nouns))


def plain_phrase(dice: Dice, noun: Noun, subject: Nominal | None) -> NounPhrase:
  """A definite singular without adjectives: the teacher, my mother."""
  if "kin" in noun.classes:
    return NounPhrase(noun, DETERMINERS[possessive(dice, noun, subject)])
  return NounPhrase(noun, DETERMINERS["the"])


def things(dice: Dice, classes: str, subject: Nominal | None) -> Nominal:
  """Two or three indefinite things joined: a book and a newspaper; an apple, milk or cheese."""
  nouns = [pick_noun(dice, classes) for _ in range(2 + dice.chance(0.2))]
  if len({noun.english for noun in nouns}) < len(nouns):
    return noun_phrase(dice, nouns[0], subject=subject)
  members = [NounPhrase(noun, DETERMINERS["a" if noun.german_plural else "zero"]) for noun in nouns]
  return Group(OR if dice.chance(0.2) else AND, tuple(members))


def possessive(dice: Dice, noun: Noun, subject: Nominal | None) -> str:
  """The key of a possessive determiner: mostly the subject's own; but no dog has a grandmother."""
  orphan = subject is None or ("kin" in noun.classes and not is_person(subject))
  own = own_possessive(subject) if not orphan and dice.chance(0.75) else None
  return own or dice.weighted(_MY if subject is None else _MY[:3])


def noun_phrase(
  dice: Dice,
  noun: Noun,
  *,
  subject: Nominal | None = None,
  definite: bool = False,
  place: bool = False,
  plural: bool = True,
) -> NounPhrase:
  """A random noun phrase with this noun; a place is singular and mostly definite."""
  countable = noun.german_plural and "unique" not in noun.classes
  plural = bool(countable) and plural and not place and dice.chance(0.22)
  kind = _determiner_kind(dice, noun, plural, definite, place)
  owner, number = None, 0
  if kind == "owner":
    owner = owner_of(dice, noun, subject)
    kind = "zero" if isinstance(owner, Name) else "the"
  elif kind == "number":
    small = "person" in noun.classes or dice.chance(0.75)
    number = dice.pick(range(2, 11)) if small else dice.pick(range(11, 100))
    kind = "zero"
  elif kind == "mine":
    kind = possessive(dice, noun, subject)
  qualities, joint = attributes(dice, noun)
  return NounPhrase(noun, DETERMINERS[kind], plural, number, qualities, joint, owner)


def _determiner_kind(dice: Dice, noun: Noun, plural: bool, definite: bool, place: bool) -> str:
  is_kin = "kin" in noun.classes
  if "unique" in noun.classes:
    return "the"
  if is_kin:
    return "mine" if plural else dice.weighted(_KIN)
  one = _PLACE if place else _SINGULAR if noun.german_plural else _MASS
  kind = dice.weighted(_PLURAL if plural else one)
  if definite and kind in _INDEFINITE:
    return "the"
  if kind in ("mine", "owner") and noun.classes.isdisjoint(_OWNED):
    return "the"
  return kind


def owner_of(dice: Dice, noun: Noun, subject: Nominal | None) -> NounPhrase | Name:
  """Anna's, the teacher's, my mother's."""
  if dice.chance(0.35):
    return name(dice)
  person = pick_noun(dice, "person")
  return plain_phrase(dice, person if person is not noun else pick_noun(dice, "job"), subject)
