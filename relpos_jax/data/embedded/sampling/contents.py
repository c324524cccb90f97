"""Random infinitives, and verbs that govern a clause: says that, asks where, tries to."""

from dataclasses import replace

from relpos_jax.data.embedded.lexicon import CLAUSE_VERBS, SMALL_WORDS, Verb
from relpos_jax.data.embedded.sampling.adjuncts import pick_time, setting
from relpos_jax.data.embedded.sampling.clauses import (
  bare_clause,
  deeds_besides,
  negated,
  pick_tense,
)
from relpos_jax.data.embedded.sampling.dice import Dice
from relpos_jax.data.embedded.sampling.gaps import w_question
from relpos_jax.data.embedded.sampling.links import era_of
from relpos_jax.data.embedded.sampling.nominals import nominal
from relpos_jax.data.embedded.tree import NO_WORDS, Clause, Link

_KINDS = ("that", "whether", "question", "zu", "gerund")


def purpose(dice: Dice, built: Clause) -> Link:
  """In order to, um zu; or without, ohne zu."""
  words = ("in order", "um") if dice.chance(0.8) else ("without", "ohne")
  form = "infinitive" if words[1] == "um" else "gerund"
  return Link(SMALL_WORDS[words], form, infinitive(dice, built))


def infinitive(dice: Dice, built: Clause) -> Clause:
  """What somebody wants to do: a clause whose verb stays in the infinitive."""
  inner = bare_clause(dice, subject=built.subject, verb=dice.pick(deeds_besides(built)))
  return setting(dice, replace(inner, tense="infinitive", modal=""))


def governing(dice: Dice, era: str, embedded: bool) -> Clause:
  """Someone says that, asks whether, knows where, tries to: a verb with a clause as its object."""
  verb = dice.pick(CLAUSE_VERBS)
  subject = nominal(dice, "person")
  tense, modal = pick_tense(dice, verb, subject, era)
  built = Clause(subject, verb, (), tense, modal)
  if not modal and verb.tags & {"that", "question"} and dice.chance(0.15):
    built = negated(built)
  if not built.negated and not embedded and dice.chance(0.12):
    time = pick_time(dice, built)
    built = replace(built, time=time, front="time") if time else built
  return built


def content_kind(dice: Dice, verb: Verb) -> str:
  """One of the kinds of clauses that a verb governs."""
  return dice.pick([kind for kind in _KINDS if kind in verb.tags])


def infinite_content(dice: Dice, built: Clause, kind: str) -> Link:
  """Tries to open the door, stops opening the door: in German both are zu-infinitives."""
  form = "infinitive" if kind == "zu" else "gerund"
  return Link(NO_WORDS, form, infinitive(dice, built))


def asked_content(dice: Dice, built: Clause) -> Link:
  """Where she lives: an indirect question, verb last in German."""
  era = "past" if era_of(built) == "past" else "any"
  return Link(NO_WORDS, "finite", replace(w_question(dice, era), question=False))
