"""The embedded corpus: derivations written by hand, with the pair that a teacher expects."""

from dataclasses import replace

import pytest

from relpos_jax.data.embedded.lexicon import DETERMINERS, SMALL_WORDS, VERBS, Pair, Verb, nouns_of
from relpos_jax.data.embedded.surface import pair
from relpos_jax.data.embedded.tree import (
  Clause,
  Link,
  Name,
  NounPhrase,
  Phrase,
  Pronoun,
  Relative,
  Sentence,
)


def _verb(german_verb, english=None):
  found = (v for v in VERBS if v.german == german_verb and english in (None, v.english))
  return next(found)


def _the(noun, determiner="the", **rest):
  return NounPhrase(nouns_of(noun)[0], DETERMINERS[determiner], **rest)


def _acc(nominal):
  return Phrase("", "", "A", nominal)


def _dat(nominal, english=""):
  return Phrase(english, "", "D", nominal)


TEACHER, BOOK, ANNA = _the("teacher"), _acc(_the("book")), Name("Anna", "Anna", "f")
READS = Clause(TEACHER, _verb("lesen"), (BOOK,))
GETS_UP = Clause(TEACHER, _verb("auf-stehen"))
TODAY, EVENING = Pair("today", "heute"), Pair("in the evening", "am Abend")
SLOWLY, NEVER = Pair("slowly", "langsam"), Pair("never", "nie")
IN_THE_GARDEN = Phrase("in", "in", "D", _the("garden"))
BECAUSE = SMALL_WORDS["because", "weil"]
REJOICES = Clause(TEACHER, _verb("freuen"), (Phrase("to", "auf", "A", _the("party")),))
GIVES = _verb("geben")


def _because(clause):
  return Link(BECAUSE, "finite", clause)


def _it(gender):
  return Pronoun("it", gender)


WHO_SHE = Relative("f", plural=False, human=True)
WHICH_SHE_BUYS = Clause(ANNA, _verb("kaufen"), (_acc(Relative("n", False, False)),), front="0")
WHOM_SHE_HELPS = Clause(ANNA, _verb("helfen"), (_dat(Relative("m", False, True)),), front="0")
WHOSE_DOG = _the("dog", "zero", owner=Relative("m", plural=False, human=True))
WHOSE_DOG_BARKS = Clause(WHOSE_DOG, _verb("bellen"))
IN_WHICH = Phrase("in", "in", "D", Relative("n", False, False))
HOUSE_IN_WHICH_SHE_SLEEPS = _the(
  "house", relative=Clause(ANNA, _verb("schlafen"), place=IN_WHICH, front="place")
)

PAIRS = [
  (READS, "The teacher reads the book.", "Der Lehrer liest das Buch."),
  (
    replace(READS, time=TODAY, front="time"),
    "Today the teacher reads the book.",
    "Heute liest der Lehrer das Buch.",
  ),
  (
    replace(READS, place=IN_THE_GARDEN, front="place"),
    "In the garden the teacher reads the book.",
    "Im Garten liest der Lehrer das Buch.",
  ),
  (
    replace(READS, time=EVENING, manner=SLOWLY, place=IN_THE_GARDEN),
    "The teacher reads the book slowly in the garden in the evening.",
    "Der Lehrer liest am Abend das Buch langsam im Garten.",
  ),
  (
    replace(READS, objects=(_acc(_the("book", "a")),), time=EVENING, place=IN_THE_GARDEN),
    "The teacher reads a book in the garden in the evening.",
    "Der Lehrer liest am Abend im Garten ein Buch.",
  ),
  (
    replace(READS, negated=True),
    "The teacher does not read the book.",
    "Der Lehrer liest das Buch nicht.",
  ),
  (
    replace(READS, negated=True, objects=(_acc(_the("book", "any")),)),
    "The teacher does not read a book.",
    "Der Lehrer liest kein Buch.",
  ),
  (
    replace(READS, adverb=NEVER, tense="perfect"),
    "The teacher has never read the book.",
    "Der Lehrer hat das Buch nie gelesen.",
  ),
  (replace(READS, tense="past"), "The teacher read the book.", "Der Lehrer las das Buch."),
  (
    replace(READS, tense="progressive"),
    "The teacher is reading the book.",
    "Der Lehrer liest das Buch.",
  ),
  (
    replace(READS, tense="future", time=TODAY),
    "The teacher will read the book today.",
    "Der Lehrer wird heute das Buch lesen.",
  ),
  (
    replace(READS, modal="können", negated=True),
    "The teacher cannot read the book.",
    "Der Lehrer kann das Buch nicht lesen.",
  ),
  (
    replace(READS, modal="dürfen", negated=True),
    "The teacher must not read the book.",
    "Der Lehrer darf das Buch nicht lesen.",
  ),
  (
    replace(READS, modal="müssen", negated=True),
    "The teacher does not have to read the book.",
    "Der Lehrer muss das Buch nicht lesen.",
  ),
  (
    replace(READS, modal="müssen", tense="past"),
    "The teacher had to read the book.",
    "Der Lehrer musste das Buch lesen.",
  ),
  (
    replace(READS, front="", question=True),
    "Does the teacher read the book?",
    "Liest der Lehrer das Buch?",
  ),
  (
    replace(READS, subject=Pronoun("who"), question=True),
    "Who reads the book?",
    "Wer liest das Buch?",
  ),
  (
    replace(READS, objects=(_acc(Pronoun("what")),), front="0", question=True, tense="past"),
    "What did the teacher read?",
    "Was las der Lehrer?",
  ),
  (GETS_UP, "The teacher gets up.", "Der Lehrer steht auf."),
  (replace(GETS_UP, tense="perfect"), "The teacher has got up.", "Der Lehrer ist aufgestanden."),
  (replace(GETS_UP, modal="müssen"), "The teacher must get up.", "Der Lehrer muss aufstehen."),
  (
    replace(
      GETS_UP,
      tense="imperative",
      subject=Pronoun("you"),
      front="opener",
      opener=Pair("please", "bitte"),
    ),
    "Please get up.",
    "Bitte steh auf.",
  ),
  (
    replace(READS, link=_because(GETS_UP)),
    "The teacher reads the book because the teacher gets up.",
    "Der Lehrer liest das Buch, weil der Lehrer aufsteht.",
  ),
  (
    replace(READS, lead=_because(replace(GETS_UP, tense="perfect")), front=""),
    "Because the teacher has got up, the teacher reads the book.",
    "Weil der Lehrer aufgestanden ist, liest der Lehrer das Buch.",
  ),
  (
    replace(
      READS,
      link=Link(SMALL_WORDS["in order", "um"], "infinitive", replace(GETS_UP, tense="infinitive")),
    ),
    "The teacher reads the book in order to get up.",
    "Der Lehrer liest das Buch, um aufzustehen.",
  ),
  (REJOICES, "The teacher looks forward to the party.", "Der Lehrer freut sich auf das Fest."),
  (
    replace(REJOICES, subject=Pronoun("I"), time=TODAY, front="time"),
    "Today I look forward to the party.",
    "Heute freue ich mich auf das Fest.",
  ),
  (
    replace(REJOICES, time=TODAY, front="time"),
    "Today the teacher looks forward to the party.",
    "Heute freut sich der Lehrer auf das Fest.",
  ),
  (
    Clause(TEACHER, _verb("helfen"), (_dat(Pronoun("I")),), time=TODAY, front="time"),
    "Today the teacher helps me.",
    "Heute hilft mir der Lehrer.",
  ),
  (
    Clause(TEACHER, _verb("sehen"), (_acc(Pronoun("she", "f")),), time=TODAY, front="time"),
    "Today the teacher sees her.",
    "Heute sieht der Lehrer sie.",
  ),
  (
    Clause(TEACHER, GIVES, (_acc(_the("book", "a")), _dat(_the("child"), "to"))),
    "The teacher gives a book to the child.",
    "Der Lehrer gibt dem Kind ein Buch.",
  ),
  (
    Clause(TEACHER, GIVES, (BOOK, _dat(_the("child", "a"), "to"))),
    "The teacher gives the book to a child.",
    "Der Lehrer gibt das Buch einem Kind.",
  ),
  (
    Clause(TEACHER, GIVES, (_acc(_it("n")), _dat(Pronoun("he"), "to")), time=TODAY),
    "The teacher gives it to him today.",
    "Der Lehrer gibt es ihm heute.",
  ),
  (
    Clause(TEACHER, _verb("ein-schalten"), (_acc(_it("f")),)),
    "The teacher turns it on.",
    "Der Lehrer schaltet sie ein.",
  ),
  (
    Clause(TEACHER, GIVES, (BOOK, _dat(_the("child"), "to")), "past"),
    "The teacher gave the book to the child.",
    "Der Lehrer gab dem Kind das Buch.",
  ),
  (
    Clause(TEACHER, _verb("schreiben"), (_acc(_the("letter", "this")),), "perfect"),
    "The teacher has written this letter.",
    "Der Lehrer hat diesen Brief geschrieben.",
  ),
  (
    replace(READS, subject=_the("woman", relative=Clause(WHO_SHE, _verb("tanzen")))),
    "The woman who dances reads the book.",
    "Die Frau, die tanzt, liest das Buch.",
  ),
  (
    replace(READS, tense="perfect", objects=(_acc(_the("book", relative=WHICH_SHE_BUYS)),)),
    "The teacher has read the book that Anna buys.",
    "Der Lehrer hat das Buch gelesen, das Anna kauft.",
  ),
  (
    replace(GETS_UP, subject=_the("man", relative=WHOM_SHE_HELPS)),
    "The man whom Anna helps gets up.",
    "Der Mann, dem Anna hilft, steht auf.",
  ),
  (
    replace(GETS_UP, subject=_the("man", relative=WHOSE_DOG_BARKS)),
    "The man whose dog barks gets up.",
    "Der Mann, dessen Hund bellt, steht auf.",
  ),
  (
    Clause(TEACHER, _verb("bleiben"), (Phrase("in", "in", "D", HOUSE_IN_WHICH_SHE_SLEEPS),)),
    "The teacher stays in the house in which Anna sleeps.",
    "Der Lehrer bleibt in dem Haus, in dem Anna schläft.",
  ),
  (
    Clause(TEACHER, _verb("kennen-lernen"), (_acc(Pronoun("she", "f")),)),
    "The teacher gets to know her.",
    "Der Lehrer lernt sie kennen.",
  ),
  (
    Clause(TEACHER, _verb("helfen"), (_dat(ANNA),), also=(READS,), joint=SMALL_WORDS["and", "und"]),
    "The teacher helps Anna and reads the book.",
    "Der Lehrer hilft Anna und liest das Buch.",
  ),
]


@pytest.mark.parametrize(("clause", "english", "german_text"), PAIRS)
def test_pairs_written_by_hand(clause, english, german_text):
  mark = "?" if clause.question else "."
  assert pair(Sentence((clause,), mark=mark)) == (english, german_text)


@pytest.mark.parametrize(
  ("joint", "english", "german_text"),
  [
    (("and", "und"), "The teacher gets up, and", "Der Lehrer steht auf und der"),
    (("but", "aber"), "The teacher gets up, but", "Der Lehrer steht auf, aber der"),
    (("for", "denn"), "The teacher gets up, for", "Der Lehrer steht auf, denn der"),
    (("or", "oder"), "The teacher gets up, or", "Der Lehrer steht auf oder der"),
  ],
)
def test_coordinated_main_clauses(joint, english, german_text):
  tree = Sentence((GETS_UP, READS), (SMALL_WORDS[joint],))
  expected = f"{english} the teacher reads the book.", f"{german_text} Lehrer liest das Buch."
  assert pair(tree) == expected


def test_deshalb_takes_the_first_place():
  tree = Sentence((GETS_UP, replace(READS, front="")), (SMALL_WORDS["so", "deshalb"],))
  assert pair(tree)[1] == "Der Lehrer steht auf, deshalb liest der Lehrer das Buch."


def test_verbs_outside_the_lexicon_conjugate():
  """The grammar's own verbs: es gibt, es regnet."""
  there = Clause(Pronoun("there", "n"), Verb("be", "geben"), (_acc(_the("dog", "a")),))
  plural = _the("dog", "zero", plural=True)
  assert pair(Sentence((there,))) == ("There is a dog.", "Es gibt einen Hund.")
  many = replace(there, objects=(_acc(plural),), tense="past")
  assert pair(Sentence((many,))) == ("There were dogs.", "Es gab Hunde.")
