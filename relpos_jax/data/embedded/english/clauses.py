"""English syntax: puts a tree in English order.

Subject, auxiliaries, adverb, verb, objects, manner, place, time. Questions and negations take do
where there is no other auxiliary.
"""

from relpos_jax.data.embedded.english import forms
from relpos_jax.data.embedded.english.phrases import nominal, part
from relpos_jax.data.embedded.tree import (
  Clause,
  Link,
  Nominal,
  NounPhrase,
  Part,
  Phrase,
  Pronoun,
  Sentence,
  constituent,
  person,
)

# The German modal by tense (and negated): the English words, to be followed by the verb.
_MODALS = {
  ("können", "present"): "can",
  ("können", "past"): "could",
  ("müssen", "present"): "must",
  ("müssen", "past"): "have to",
  ("dürfen", "present"): "may",
  ("dürfen", "past"): "be allowed to",
  ("wollen", "present"): "want to",
  ("wollen", "past"): "want to",
  ("sollen", "past"): "should",
  ("möchten", "present"): "would like to",
}
_NEGATED_MODALS = {("müssen", "present"): "have to", ("dürfen", "present"): "must"}
_UNINFLECTED = ("can", "could", "must", "may", "should", "would", "will")
_PAST = ("past", "past progressive", "pluperfect")


def sentence(node: Sentence) -> list[str]:
  """The words of a sentence, commas included."""
  words = main(node.clauses[0])
  for joint, clause in zip(node.joints, node.clauses[1:], strict=True):
    words += [",", joint.english, *main(clause)]
  return [*words, node.mark]


def main(clause: Clause) -> list[str]:
  """A main clause; a question has its auxiliary before the subject unless that is asked for."""
  lead = [*linked(clause.lead), ","] if clause.lead else []
  inverted = clause.question and clause.front != "subject"
  return [*lead, *fronted(clause), *finite(clause, inverted), *linked(clause.link)]


def subordinate(clause: Clause) -> list[str]:
  """A dependent clause, in the order of a main one."""
  return [*fronted(clause), *finite(clause, False), *linked(clause.link)]


def fronted(clause: Clause) -> list[str]:
  """What stands before the subject."""
  if clause.front in ("", "subject"):
    return []
  node = constituent(clause, clause.front)
  return part(node) if isinstance(node, Part) else []


def finite(clause: Clause, inverted: bool) -> list[str]:
  """Subject, verb and the rest, and the further verb phrases of the same subject."""
  auxiliary, verb = verb_group(clause, inverted)
  subject = [] if clause.tense == "imperative" else subject_of(clause.subject)
  adverb = ["not"] if clause.negated else part(clause.adverb) if clause.adverb else []
  first = [*auxiliary, *subject] if inverted else [*subject, *auxiliary]
  words = [*first, *adverb, *rest(clause, verb)]
  for other in clause.also:
    words += [clause.joint.english, *rest(other, verb_group(other, False)[1][-1:])]
  return words


def subject_of(node: Nominal) -> list[str]:
  """The subject with its relative clause."""
  return [*nominal(node), *relative_clause(node)]


def relative_clause(node: Nominal) -> list[str]:
  """The relative clause of a noun phrase; English defines without commas."""
  return subordinate(node.relative) if isinstance(node, NounPhrase) and node.relative else []


def verb_group(clause: Clause, inverted: bool) -> tuple[list[str], list[str]]:
  """The finite auxiliary, if there is one, and the other verbs; the last is the clause's own."""
  head, *others = chain(clause)
  past = clause.tense in _PAST
  who = agreement(clause)
  if head in _UNINFLECTED:
    return [head], others
  if head == "be" or (others and head == "have" and others[0] != "to"):
    return [forms.conjugate(head, who, past)], others
  if clause.tense == "imperative":
    return (["do"] if clause.negated else []), [head]
  if inverted or clause.negated:
    return [forms.conjugate("do", who, past)], [head, *others]
  return [], [forms.conjugate(head, who, past), *others]


def agreement(clause: Clause) -> str:
  """Person and number of the subject, or of what there is."""
  expletive = isinstance(clause.subject, Pronoun) and clause.subject.english == "there"
  there_is = clause.objects[0] if expletive else None
  return person(there_is.nominal if isinstance(there_is, Phrase) else clause.subject)


def chain(clause: Clause) -> list[str]:
  """The verbs before inflection of the first: has been reading is have, been, reading."""
  verb = clause.verb.english.split()[0]
  if clause.modal:
    key = (clause.modal, clause.tense)
    words = _NEGATED_MODALS.get(key) if clause.negated else None
    return [*(words or _MODALS[key]).split(), verb]
  if clause.tense == "future":
    return ["will", verb]
  if clause.tense in ("progressive", "past progressive"):
    return ["be", forms.gerund(verb)]
  return ["have", forms.participle(verb)] if clause.tense in ("perfect", "pluperfect") else [verb]


def rest(clause: Clause, verb: list[str]) -> list[str]:
  """The verb with its particle, the objects, and manner, place, time."""
  front = constituent(clause, clause.front) if clause.front else None
  objects = [node for node in clause.objects if node is not front]
  adjuncts = [clause.manner, clause.place, clause.time, clause.cause]
  kept = [node for node in adjuncts if node and node is not front]
  words = [*verb, *with_particle(clause.verb.english.split()[1:], objects)]
  return words + [word for node in kept for word in part(node)]


def with_particle(particle: list[str], objects: list[Part]) -> list[str]:
  """Turns on the lamp, turns it on, but gets to know him."""
  words = [[*part(node), *_object_relative(node)] for node in objects]
  first = objects[0] if objects else None
  short = isinstance(first, Phrase) and isinstance(first.nominal, Pronoun) and not first.english
  words.insert(short and particle[:1] != ["to"], particle)
  return [word for group in words for word in group]


def _object_relative(node: Part) -> list[str]:
  return relative_clause(node.nominal) if isinstance(node, Phrase) else []


def linked(link: Link | None) -> list[str]:
  """A dependent clause with its conjunction; only `main` sets a comma."""
  if link is None:
    return []
  words = part(link.words)
  if link.form == "finite":
    return [*words, *subordinate(link.clause)]
  verb = link.clause.verb.english.split()[0]
  verbs = ["to", verb] if link.form == "infinitive" else [forms.gerund(verb)]
  return [*words, *rest(link.clause, verbs), *linked(link.clause.link)]
