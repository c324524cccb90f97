"""The embedded corpus as a whole: its lexicon, splits, lengths, and that a seed decides it."""

import json
import os
import subprocess
import sys

import pytest

from relpos_jax.data.corpus import load_corpus
from relpos_jax.data.embedded import lexicon
from relpos_jax.data.embedded.german.nominals import CASES, noun_form
from relpos_jax.errors import InputError

# Prints the splits and the lexemes that training never shows. In a process of its own: without the
# type checks of a test run, and with another hash seed.
_SCRIPT = """
import json, sys
from relpos_jax.data.embedded import lexicon
from relpos_jax.data.embedded.splits import derivations
from relpos_jax.data.embedded.tree import walk

seed, train_size = map(int, sys.argv[1:])
splits, used = {}, set()
for name, derivation in derivations(seed, train_size):
  splits.setdefault(name, []).append(derivation[1:])
  used.update(id(node) for node in walk(derivation.tree) if name == "train")
entries = [*lexicon.NOUNS, *lexicon.VERBS, *lexicon.CLAUSE_VERBS, *lexicon.ADJECTIVES]
entries += [*lexicon.DETERMINERS.values(), *lexicon.SMALL_WORDS.values()]
entries += [*lexicon.TIMES, *lexicon.ADVERBS, *lexicon.OPENERS, *lexicon.MANNERS]
print(json.dumps({
  "splits": splits,
  "unused": [(entry.english, entry.german) for entry in entries if id(entry) not in used],
}))
"""


def _generate(seed, train_size, hash_seed):
  command = [sys.executable, "-c", _SCRIPT, str(seed), str(train_size)]
  environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
  return json.loads(
    subprocess.run(command, env=environment, capture_output=True, check=True).stdout
  )


@pytest.fixture(scope="module")
def generated():
  return _generate(seed=0, train_size=20_000, hash_seed="1")


def test_default_corpus(generated):
  """Sizes and lengths; no sentence twice; one source, one target; every lexeme in train."""
  splits = generated["splits"]
  sizes = {name: len(pairs) for name, pairs in splits.items()}
  assert sizes == {"train": 20_000, "valid": 500, "test": 500, "long": 200}
  for side in (0, 1):
    sentences = [pair[side] for pairs in splits.values() for pair in pairs]
    assert len(set(sentences)) == len(sentences)
    lengths = {name: sorted(len(pair[side].split()) for pair in splits[name]) for name in splits}
    for name in ("train", "valid", "test"):
      assert lengths[name][0] >= 3 and lengths[name][-1] <= 30
      assert 7 <= lengths[name][len(lengths[name]) // 2] <= 10
    assert lengths["train"][-1] == 30 and lengths["long"][0] >= 31 and lengths["long"][-1] <= 60
  assert generated["unused"] == []
  words = {word for _, target in splits["train"] for word in target.split()}
  prepositions = (*lexicon.SPOTS, *lexicon.CAUSES)
  assert {pair.german.partition("+")[0] for pair in prepositions} <= words


def test_seed_alone_decides(generated):
  """Another process, another hash seed, fewer training sentences: the same, and train a prefix."""
  again = _generate(seed=0, train_size=1_000, hash_seed="2")["splits"]
  for name in ("valid", "test", "long"):
    assert again[name] == generated["splits"][name]
  assert again["train"] == generated["splits"]["train"][:1_000]


def test_seeds_differ(generated):
  other = _generate(seed=1, train_size=1, hash_seed="1")["splits"]
  assert not {pair[0] for pair in other["long"]} & {pair[0] for pair in generated["splits"]["long"]}


@pytest.mark.parametrize("train_size", [0, -3])
def test_train_size_must_be_positive(train_size):
  with pytest.raises(InputError, match=f"train_size {train_size}"):
    load_corpus("embedded", train_size=train_size)


def test_lexicon_has_four_hundred_lemmas():
  content = (*lexicon.NOUNS, *lexicon.VERBS, *lexicon.CLAUSE_VERBS, *lexicon.ADJECTIVES)
  assert len({(entry.english, entry.german) for entry in content}) >= 400
  assert len(lexicon.lemmas()) >= 500


def test_every_class_of_meaning_has_nouns():
  named = {name for verb in lexicon.VERBS for name in verb.subject.split()}
  named |= {name for verb in lexicon.VERBS for slot in verb.slots for name in slot.classes.split()}
  named |= {name for adjective in lexicon.ADJECTIVES for name in adjective.classes}
  named |= {tag[1:] for verb in lexicon.VERBS for tag in verb.tags if tag.startswith("@")}
  named |= {name for spot in lexicon.SPOTS for name in spot.tags}
  known = {name for noun in lexicon.NOUNS for name in noun.classes}
  assert named - known == set()


def test_every_manner_has_a_verb():
  tags = {tag for verb in lexicon.VERBS for tag in verb.tags}
  assert {tag for manner in lexicon.MANNERS for tag in manner.tags} <= tags


def test_one_german_noun_to_one_english_one():
  english = [noun.english for noun in lexicon.NOUNS]
  german = [noun.german for noun in lexicon.NOUNS]
  assert len(set(english)) == len(english)
  assert len(set(german)) == len(german)


def test_places_have_prepositions():
  placed = {noun.place for noun in lexicon.NOUNS} - {""}
  assert placed == set(lexicon.PLACES)


def test_where_is_dative_and_whither_is_not():
  assert {spot.german.partition("+")[2] for spot in lexicon.SPOTS} == {"D"}
  assert {where.partition("+")[2] for _, where, *_ in lexicon.PLACES.values()} == {"D"}
  goals = {goal for *_, goal, _ in lexicon.PLACES.values()}
  assert goals == {"in+A", "auf+A", "an+A", "zu+D"}


def test_german_nouns_are_capitalised():
  for noun in lexicon.NOUNS:
    forms = [noun_form(noun, case, False) for case in CASES]
    forms += [noun_form(noun, case, True) for case in CASES] if noun.german_plural else []
    assert all(form[0].isupper() for form in forms)
