"""The embedded corpus: its checksums are the recorded ones; splits have no sentence in common."""

import hashlib
import pathlib

import pytest

from relpos_jax.errors import InputError
from relpos_jax.translation import embedded
from relpos_jax.translation.corpus import load_corpus

SHA256 = {
  "train": "a61596f2318cf4e374c7f2aa8eada7e1bc8f5e565a03fb81bdf7f91dab1e157f",
  "valid": "993058df684f5ab311f00c61f9b1098196f8154fcc037b178c37440ca69fcd0e",
  "test": "7c701df7db1894a9f781cc6bc6d6db8ef3dd9f2e9b2aa8edefb9d371e028c911",
  "long": "60daa37a767d78a05fd1b21355bd1fa2c05145a29ee03d46e4cafba895df2eb1",
}


@pytest.fixture(scope="module")
def splits():
  return load_corpus("embedded").splits


@pytest.mark.parametrize("name", SHA256)
def test_text_is_as_recorded_and_as_the_readme_says(splits, name):
  text = "".join(f"{source}\t{target}\n" for source, target in splits[name])
  found = hashlib.sha256(text.encode()).hexdigest()
  readme = pathlib.Path(embedded.__file__).with_name("README.md").read_text(encoding="utf-8")
  (row,) = [line for line in readme.splitlines() if line.startswith(f"| {name}.tsv.xz |")]
  assert found == SHA256[name]
  assert f"| {len(splits[name]):,} |" in row and found in row


@pytest.mark.parametrize("side", [0, 1])
def test_no_sentence_occurs_twice(splits, side):
  assert [*splits] == [*SHA256]
  sentences = [pair[side] for pairs in splits.values() for pair in pairs]
  assert len({*sentences}) == len(sentences) == 21_200


def test_lengths_are_in_words_and_long_is_longer(splits):
  for name, pairs in splits.items():
    shortest, longest = (31, 60) if name == "long" else (3, 30)
    lengths = [len(sentence.split()) for pair in pairs for sentence in pair]
    assert shortest <= min(lengths) and max(lengths) <= longest


def test_train_size_takes_the_first_pairs_and_leaves_the_other_splits(splits):
  few = load_corpus("embedded", train_size=7).splits
  assert few == {**splits, "train": splits["train"][:7]}


@pytest.mark.parametrize("train_size", [-3, 0, 20_001])
def test_train_size_must_be_there(train_size):
  with pytest.raises(InputError, match=f"train_size {train_size} .* from 1 to 20000"):
    load_corpus("embedded", train_size=train_size)
