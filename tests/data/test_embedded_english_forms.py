"""English inflection against forms written out."""

import pytest

from relpos_jax.data.embedded.english import forms
from relpos_jax.data.embedded.english.phrases import nominal
from relpos_jax.data.embedded.lexicon import (
  ADJECTIVES,
  CLAUSE_VERBS,
  DETERMINERS,
  NOUNS,
  VERBS,
  nouns_of,
)
from relpos_jax.data.embedded.tree import NounPhrase, Quality

# base: third person, past, participle, -ing
VERB_FORMS = """
be is was been being
have has had had having
go goes went gone going
carry carries carried carried carrying
play plays played played playing
obey obeys obeyed obeyed obeying
cross crosses crossed crossed crossing
teach teaches taught taught teaching
wash washes washed washed washing
stop stops stopped stopped stopping
plan plans planned planned planning
hug hugs hugged hugged hugging
get gets got got getting
begin begins began begun beginning
forget forgets forgot forgotten forgetting
travel travels travelled travelled travelling
swim swims swam swum swimming
open opens opened opened opening
visit visits visited visited visiting
show shows showed shown showing
read reads read read reading
write writes wrote written writing
lie lies lay lain lying
lay lays laid laid laying
die dies died died dying
see sees saw seen seeing
refuse refuses refused refused refusing
"""


@pytest.mark.parametrize("row", VERB_FORMS.strip().splitlines())
def test_verbs(row):
  base, third, past, participle, gerund = row.split()
  assert forms.conjugate(base, "3s") == third
  assert forms.conjugate(base, "3s", past=True) == past
  assert forms.participle(base) == participle
  assert forms.gerund(base) == gerund


def test_be_agrees_in_person():
  found = [forms.conjugate("be", person) for person in ("1s", "2s", "3s", "1p", "3p")]
  assert found == ["am", "are", "is", "are", "are"]
  assert [forms.conjugate("be", person, past=True) for person in ("1s", "2s")] == ["was", "were"]


def test_regular_verbs_of_the_lexicon():
  """No irregular verb is taken for a regular one."""
  verbs = {verb.english.split()[0] for verb in (*VERBS, *CLAUSE_VERBS)}
  regular = {verb for verb in verbs if forms.participle(verb) not in ("fed", verb)}
  regular = {verb for verb in regular if forms.participle(verb).endswith("ed")}
  expected = """
answer arrive ask bake bark believe belong bloom borrow burn call carry celebrate chase claim clean
climb close complain congratulate contradict cook correct cross cry dance decide depart describe
discuss dream end examine explain fear follow greet hate help hike hope hug hurry introduce invite
jump kiss laugh learn like listen live look love marry miss need notice obey offer open order
organise own paint park photograph pick place plan plant play prepare promise protect pull push
reach receive recommend refuse remember repair rest return save sign smile solve stay stop thank
tidy translate travel trust try turn visit wait wash watch water wonder work
"""
  assert regular == set(expected.split())


@pytest.mark.parametrize(
  ("singular", "plural"),
  [
    *(("man", "men"), ("woman", "women"), ("child", "children"), ("policeman", "policemen")),
    *(("mouse", "mice"), ("goose", "geese"), ("wolf", "wolves"), ("thief", "thieves")),
    *(("knife", "knives"), ("shelf", "shelves"), ("scarf", "scarves"), ("bench", "benches")),
    *(("box", "boxes"), ("glass", "glasses"), ("baby", "babies"), ("library", "libraries")),
    *(("boy", "boys"), ("potato", "potatoes"), ("tomato", "tomatoes"), ("photo", "photos")),
    *(("roof", "roofs"), ("fairy tale", "fairy tales"), ("princess", "princesses")),
  ],
)
def test_plurals(singular, plural):
  assert next(noun for noun in NOUNS if noun.english == singular).english_plural == plural


def _adjective(english):
  return next(adjective for adjective in ADJECTIVES if adjective.english == english)


@pytest.mark.parametrize(
  ("noun", "adjective", "words"),
  [
    *(("teacher", None, "a teacher"), ("actress", None, "an actress")),
    *(("actress", "honest", "an honest actress"), ("apple", "red", "a red apple")),
    *(("uncle", "old", "an old uncle"), ("umbrella", "ugly", "an ugly umbrella")),
  ],
)
def test_indefinite_article(noun, adjective, words):
  qualities = (Quality(_adjective(adjective)),) if adjective else ()
  phrase = NounPhrase(nouns_of(noun)[0], DETERMINERS["a"], qualities=qualities)
  assert " ".join(nominal(phrase)) == words


@pytest.mark.parametrize(
  ("owner", "plural", "words"),
  [
    *(("teacher", False, "the teacher's dog"), ("teacher", True, "the teachers' dog")),
    *(("child", True, "the children's dog"), ("princess", False, "the princess's dog")),
  ],
)
def test_possessors(owner, plural, words):
  owner = NounPhrase(nouns_of(owner)[0], DETERMINERS["the"], plural)
  dog = NounPhrase(nouns_of("dog")[0], DETERMINERS["the"], owner=owner)
  assert " ".join(nominal(dog)) == words


@pytest.mark.parametrize(
  ("adjective", "comparative"),
  [
    *(("old", "older"), ("big", "bigger"), ("hot", "hotter"), ("new", "newer")),
    *(("nice", "nicer"), ("brave", "braver"), ("heavy", "heavier"), ("friendly", "friendlier")),
    *(("clever", "cleverer"), ("quiet", "quieter"), ("good", "better"), ("bad", "worse")),
    *(("polite", None), ("expensive", None), ("hard-working", None), ("modern", None)),
  ],
)
def test_comparatives(adjective, comparative):
  assert forms.comparative(adjective) == comparative


@pytest.mark.parametrize(
  ("number", "word"),
  [
    (2, "two"),
    (12, "twelve"),
    (13, "thirteen"),
    (20, "twenty"),
    (21, "twenty-one"),
    (99, "ninety-nine"),
  ],
)
def test_numbers(number, word):
  assert forms.number_word(number) == word
