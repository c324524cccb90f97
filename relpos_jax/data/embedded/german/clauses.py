"""German syntax: puts a tree in German order.

The finite verb is second in a main clause, or first where nothing is fronted, and last in a
subordinate one. Between subject and closing verb stand, in this order: pronouns, time, cause,
definite objects, adverb or nicht, manner, place, indefinite objects, prepositional objects and
predicates. So time comes before manner before place, and known things before new ones.
"""

from relpos_jax.data.embedded.german import verbs
from relpos_jax.data.embedded.german.phrases import is_definite, nominal, part
from relpos_jax.data.embedded.lexicon import Pair
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

_REFLEXIVES = {"1s": "mich", "2s": "dich", "1p": "uns"}
_AFTER_COMMA = ("aber", "denn", "deshalb")
_UNCLEAR = ("sie", "es")
_NICHT = Pair("not", "nicht")
_PAST = ("past", "past progressive", "pluperfect")
_COMPOUND = ("future", "perfect", "pluperfect")


def sentence(node: Sentence) -> list[str]:
  """The words of a sentence, commas included."""
  words = main(node.clauses[0])
  for joint, clause in zip(node.joints, node.clauses[1:], strict=True):
    words += [*conjunction(joint), *main(clause)]
  return [*words, node.mark]


def conjunction(joint: Pair) -> list[str]:
  """Und and oder join clauses without a comma, aber and denn take one."""
  return [",", joint.german] if joint.german in _AFTER_COMMA else [joint.german]


def main(clause: Clause) -> list[str]:
  """A main clause: what is fronted, the finite verb, the middle, the rest of the verb."""
  finite, closing = predicate(clause)
  words = [*opening(clause), finite, *middle(clause), *closing, *extraposed(clause)]
  for other in clause.also:
    finite, closing = predicate(other)
    words += [*conjunction(clause.joint), *([] if is_compound(other) else [finite])]
    words += [*middle(other), *closing, *extraposed(other)]
  return words + linked(clause.link)


def opening(clause: Clause) -> list[str]:
  """What stands before the finite verb: a subordinate clause or one constituent."""
  return [*linked(clause.lead)[1:], *fronted(clause)]


def fronted(clause: Clause) -> list[str]:
  """The constituent that opens the clause."""
  node = constituent(clause, clause.front) if clause.front else None
  return beside(node) if node else []


def verb_last(clause: Clause) -> list[str]:
  """A subordinate clause after its conjunction; a relative pronoun or w-word is its front."""
  words = fronted(clause)
  for index, each in enumerate((clause, *clause.also)):
    finite, closing = predicate(each)
    words += conjunction(clause.joint) if index else []
    words += middle(each)
    words += closing if is_compound(each) else [verbs.joined(each.verb.german, finite)]
  words += [predicate(clause)[0]] if is_compound(clause) else []
  return words + extraposed((clause, *clause.also)[-1]) + linked(clause.link)


def zu_clause(clause: Clause) -> list[str]:
  """An infinitive clause: what stands around the verb, then zu and the infinitive."""
  closing = verbs.infinitive(clause.verb.german, zu=True)
  return [*middle(clause), closing, *extraposed(clause), *linked(clause.link)]


def linked(link: Link | None) -> list[str]:
  """A dependent clause between commas."""
  if link is None:
    return []
  words = verb_last(link.clause) if link.form == "finite" else zu_clause(link.clause)
  return [",", *([link.words.german] if link.words.german else []), *words, ","]


def predicate(clause: Clause) -> tuple[str, list[str]]:
  """The finite verb, and what closes a main clause: prefix, participle or infinitive."""
  verb, who = clause.verb.german, person(clause.subject)
  if clause.modal:
    return _finite(clause.modal, who, clause.tense), [verbs.infinitive(verb)]
  if clause.tense == "future":
    return verbs.present("werden")[who], [verbs.infinitive(verb)]
  if clause.tense in _COMPOUND:
    return _finite(clause.verb.auxiliary, who, clause.tense), [verbs.participle(verb)]
  prefix, base = verbs.split_prefix(verb)
  closing = [prefix.strip()] if prefix else []
  if clause.tense == "imperative":
    return verbs.imperative(base), closing
  return _finite(base, who, clause.tense), closing


def _finite(base: str, who: str, tense: str) -> str:
  return (verbs.past if tense in _PAST else verbs.present)(base)[who]


def is_compound(clause: Clause) -> bool:
  """Whether the finite verb is an auxiliary or modal and the verb itself closes the clause."""
  return bool(clause.modal) or clause.tense in _COMPOUND


def middle(clause: Clause) -> list[str]:
  """What stands between the finite verb and the end of a main clause."""
  pronouns, definite, indefinite, late = sorted_objects(clause)
  adverb = clause.adverb or (_NICHT if says_nicht(clause) else None)
  front = constituent(clause, clause.front) if clause.front else None
  subject = None if clause.tense in ("imperative", "infinitive") else clause.subject
  short = [node for node in (reflexive(clause), *pronouns) if node]
  # Hilft er mir, but hilft mir der Lehrer: what is short comes first. Sieht sie der Lehrer would
  # be understood the other way round.
  is_unclear = isinstance(subject, Pronoun) or any(part(node)[0] in _UNCLEAR for node in short)
  subjects = [subject, *short] if is_unclear else [*short, subject]
  order = [*subjects, clause.time, clause.cause, *definite, adverb]
  order += [clause.manner, clause.place, *indefinite, *late]
  return [word for node in order if node and node is not front for word in beside(node)]


def beside(node: Nominal | Part) -> list[str]:
  """The words of a part or of the subject; the subject keeps its relative clause beside it."""
  if isinstance(node, Part):
    return part(node)
  return [*nominal(node, "N"), *relative_clause(node)]


def extraposed(clause: Clause) -> list[str]:
  """The relative clauses of the objects: they follow the closing verb."""
  phrases = [node.nominal for node in clause.objects if isinstance(node, Phrase)]
  return [word for node in phrases for word in relative_clause(node)]


def relative_clause(node: Nominal) -> list[str]:
  """The relative clause of a noun phrase, between commas."""
  clause = node.relative if isinstance(node, NounPhrase) else None
  return [",", *verb_last(clause), ","] if clause else []


def reflexive(clause: Clause) -> Pair | None:
  """Mich, dich, uns or sich."""
  pronoun = _REFLEXIVES.get(person(clause.subject), "sich")
  return Pair("", pronoun) if clause.verb.reflexive else None


def sorted_objects(clause: Clause) -> tuple[list[Phrase], list[Phrase], list[Phrase], list[Part]]:
  """Pronouns, definite and indefinite objects, the rest.

  Pronouns have the accusative first (es ihm), nouns the dative (dem Kind das Buch).
  """
  phrases = [node for node in clause.objects if isinstance(node, Phrase)]
  direct = [node for node in phrases if not node.german and node.case != "N"]
  pronouns = [node for node in direct if isinstance(node.nominal, Pronoun)]
  nouns = [node for node in direct if node not in pronouns]
  nouns.sort(key=lambda node: node.case, reverse=True)
  definite = [node for node in nouns if is_definite(node.nominal)]
  indefinite = [node for node in nouns if node not in definite]
  late = [node for node in clause.objects if node not in direct]
  return sorted(pronouns, key=lambda node: node.case), definite, indefinite, late


def says_nicht(clause: Clause) -> bool:
  """A negated clause has nicht unless an object has kein."""
  objects = (node.nominal for node in clause.objects if isinstance(node, Phrase))
  has_kein = any(isinstance(n, NounPhrase) and n.determiner.german == "kein" for n in objects)
  return clause.negated and not has_kein
