"""Word order, agreement and punctuation of the embedded corpus: laws over random derivations."""

import itertools
import re
from dataclasses import replace

import pytest

from relpos_jax.data.embedded.english.forms import is_past_ambiguous
from relpos_jax.data.embedded.german import clauses as german
from relpos_jax.data.embedded.german import verbs
from relpos_jax.data.embedded.german.phrases import nominal, part
from relpos_jax.data.embedded.lexicon import DETERMINERS
from relpos_jax.data.embedded.sampling.dice import Dice
from relpos_jax.data.embedded.sampling.sentences import sentence
from relpos_jax.data.embedded.surface import pair
from relpos_jax.data.embedded.tree import Clause, Link, NounPhrase, Phrase, person, walk


@pytest.fixture(scope="module")
def trees():
  dice = Dice("laws")
  return [sentence(dice, dice.pick((1, 1, 2, 2, 3, 6))) for _ in range(800)]


def _finite_forms(clause: Clause) -> set[str]:
  """What a finite verb of the clause can look like, in agreement with its subject."""
  base = verbs.split_prefix(clause.verb.german)[1]
  who = person(clause.subject)
  if clause.tense == "imperative":
    return {verbs.imperative(base)}
  heads = (base, "sein", "haben", "werden") + ((clause.modal,) if clause.modal else ())
  return {tense(head)[who] for head in heads for tense in (verbs.present, verbs.past)}


def _main_clauses(trees):
  return [clause for tree in trees for clause in tree.clauses]


def _subordinate_clauses(trees):
  """The finite clauses of links, and relative clauses."""
  nodes = [node for tree in trees for node in walk(tree)]
  links = [node.clause for node in nodes if isinstance(node, Link) and node.form == "finite"]
  return links + [node.relative for node in nodes if isinstance(node, NounPhrase) and node.relative]


def _core(clause: Clause) -> Clause:
  """The clause without the clauses that depend on it."""
  objects = tuple(
    replace(node, nominal=_bare(node.nominal)) if isinstance(node, Phrase) else node
    for node in clause.objects
  )
  subject = _bare(clause.subject)
  return replace(clause, subject=subject, objects=objects, link=None, lead=None, also=())


def _bare(node):
  return replace(node, relative=None) if isinstance(node, NounPhrase) else node


def test_verb_second(trees):
  """One constituent, or a subordinate clause, stands before the finite verb of a main clause."""
  clauses = _main_clauses(trees)
  fronted = [clause for clause in clauses if clause.front not in ("", "subject")]
  assert len(clauses) > 800 and len(fronted) > 60
  for clause in clauses:
    words = german.main(_core(clause))
    first = 0
    if clause.front == "subject":
      first = len(nominal(clause.subject, "N"))
    elif clause.front.isdigit():
      first = len(part(clause.objects[int(clause.front)]))
    elif clause.front:
      first = len(part(getattr(clause, clause.front)))
    assert words[first] in _finite_forms(clause), words


def test_subject_follows_the_verb_where_something_else_is_fronted(trees):
  """At most a short pronoun comes between: heute hilft mir der Lehrer."""
  for clause in _main_clauses(trees):
    if clause.front not in ("", "subject") and clause.tense != "imperative":
      fronted, subject = german.fronted(clause), nominal(clause.subject, "N")
      words = german.main(_core(clause))[len(fronted) + 1 :]
      is_short = words[0] in (
        "sich",
        "mich",
        "mir",
        "dich",
        "dir",
        "uns",
        "ihn",
        "ihm",
        "ihr",
        "ihnen",
      )
      assert words[: len(subject)] == subject or (
        is_short and words[1 : len(subject) + 1] == subject
      )


def test_verb_last(trees):
  """The finite verb ends a subordinate clause, joined with its prefix."""
  clauses = _subordinate_clauses(trees)
  assert len(clauses) > 200
  for clause in clauses:
    last = " ".join(german.verb_last(_core(clause))).split()[-1]
    whole = {verbs.joined(clause.verb.german, form).split()[-1] for form in _finite_forms(clause)}
    assert last in whole | _finite_forms(clause)
    if not german.is_compound(clause):
      assert last in whole


def test_infinitive_participle_and_prefix_close_the_main_clause(trees):
  closing = {
    "future": lambda clause: verbs.infinitive(clause.verb.german),
    "perfect": lambda clause: verbs.participle(clause.verb.german),
  }
  seen = set()
  for clause in map(_core, _main_clauses(trees)):
    prefix = verbs.split_prefix(clause.verb.german)[0].strip()
    kind = "future" if clause.modal else clause.tense
    if kind in closing:
      assert german.main(clause)[-1] == closing[kind](clause)
      seen.add(kind)
    elif prefix:
      assert german.main(clause)[-1] == prefix
      seen.add("prefix")
  assert seen == {"future", "perfect", "prefix"}


def test_time_before_cause_before_manner_before_place(trees):
  seen = set()
  clauses = [node for tree in trees for node in walk(tree) if isinstance(node, Clause)]
  for clause in clauses:
    words = " ".join(german.middle(clause))
    kinds = [
      kind
      for kind in ("time", "cause", "manner", "place")
      if getattr(clause, kind) and clause.front != kind
    ]
    found = [words.rindex(" ".join(part(getattr(clause, kind)))) for kind in kinds]
    assert found == sorted(found)
    seen |= set(itertools.combinations(kinds, 2))
  assert {("time", "manner"), ("time", "place"), ("manner", "place")} <= seen


def test_negation_is_said_once(trees):
  clauses = [node for tree in trees for node in walk(tree) if isinstance(node, Clause)]
  for clause in clauses:
    core = _core(clause)
    words = " ".join([*german.fronted(core), *german.middle(core)])
    phrases = [node for node in walk(core) if isinstance(node, NounPhrase)]
    adverb = clause.adverb.german if clause.adverb else ""
    negations = clause.negated + ("nicht" in adverb)
    negations += sum(phrase.determiner is DETERMINERS["no"] for phrase in phrases)
    assert len(re.findall(r"\bnicht\b|\bkein", words)) == negations <= 1


def test_finite_verb_agrees(trees):
  """With plural subjects it ends in n or is sind; with du in st or t."""
  for clause in _main_clauses(trees):
    finite, _ = german.predicate(clause)
    if clause.tense == "imperative":
      continue
    who = person(clause.subject)
    if who in ("1p", "3p"):
      assert finite.endswith("n") or finite == "sind"
    if who == "2s":
      assert finite.endswith(("st", "t"))


def test_relative_pronouns_agree_with_their_head(trees):
  heads = [n for tree in trees for n in walk(tree) if isinstance(n, NounPhrase) and n.relative]
  for head in heads:
    first = german.verb_last(head.relative)
    gender = "p" if head.plural else head.noun.gender
    forms = {
      "m": {"der", "den", "dem", "dessen"},
      "f": {"die", "der", "deren"},
      "n": {"das", "dem", "dessen"},
      "p": {"die", "den", "denen", "deren", "der"},
    }[gender]
    prepositions = {"in", "an", "auf", "über", "von", "mit", "zu", "um", "gegen", "aus", "für"}
    assert first[0] in forms or (first[0] in prepositions and first[1] in forms), first


def test_prepositions_govern_their_case(trees):
  fixed = {
    **dict.fromkeys(("mit", "von", "aus", "zu", "nach"), "D"),
    **dict.fromkeys(("für", "gegen", "um"), "A"),
    **dict.fromkeys(("wegen", "trotz"), "G"),
  }
  two_way = ("in", "an", "auf", "über", "unter", "neben", "hinter", "vor")
  phrases = [n for tree in trees for n in walk(tree) if isinstance(n, Phrase) and n.german]
  for phrase in phrases:
    assert phrase.case in fixed.get(phrase.german, "DA")
    assert phrase.german in fixed or phrase.german in two_way
  assert {p.case for p in phrases if p.german == "in"} == {"A", "D"}


def test_places_are_dative_and_goals_accusative(trees):
  clauses = [n for tree in trees for n in walk(tree) if isinstance(n, Clause)]
  assert {c.place.case for c in clauses if isinstance(c.place, Phrase)} == {"D"}
  into = {
    o.case for c in clauses for o in c.objects if isinstance(o, Phrase) and o.english == "into"
  }
  assert into == {"A"}


def test_english_shows_the_past(trees):
  """They read, they put: never in the past, for nothing would show it."""
  clauses = [node for tree in trees for node in walk(tree) if isinstance(node, Clause)]
  unclear = [clause for clause in clauses if is_past_ambiguous(clause.verb.english.split()[0])]
  assert {clause.tense for clause in unclear} > {"past", "present"}
  for clause in unclear:
    past = clause.tense == "past" and not (clause.modal or clause.negated or clause.question)
    assert not past or person(clause.subject) == "3s"


@pytest.mark.parametrize("side", [0, 1])
def test_punctuation(trees, side):
  for tree in trees:
    text = pair(tree)[side]
    assert re.fullmatch(r"[A-ZÄÖÜ][^.?]*[.?]", text)
    assert not re.search(r" [,.?]|,,|,[.?]|  |,\S", text)
    assert text.endswith("?") == any(clause.question for clause in tree.clauses)


_CONJUNCTIONS = ("weil", "dass", "ob", "obwohl", "bevor", "nachdem", "sobald")


def test_german_commas(trees):
  """A comma before every subordinate clause, unless it opens a main one."""
  seen = set()
  for tree in trees:
    words = pair(tree)[1].split()
    for before, word in itertools.pairwise(words):
      if word in _CONJUNCTIONS:
        assert before.endswith(",") or before in ("und", "aber", "denn"), words
        seen.add(word)
  assert seen == set(_CONJUNCTIONS)


def test_english_has_do_support(trees):
  """Not follows an auxiliary, never a full verb."""
  auxiliaries = {
    *("do", "does", "did", "am", "is", "are", "was", "were", "has", "have", "can", "could"),
    *("must", "may", "should", "will", "would", "had"),
  }
  seen = 0
  for tree in trees:
    words = pair(tree)[0].replace(",", "").split()
    for index in [i for i, word in enumerate(words) if word == "not"]:
      clause_before = words[max(0, index - 12) : index]
      assert any(word.lower() in auxiliaries for word in clause_before)
      seen += 1
  assert seen > 20
