"""WMT 2014: splits as in TFDS, read lazily; errors name the remedy."""

import importlib.util

import pytest
import requests
import tensorflow_datasets as tfds
from faults import refusal

from experiments.translation import wmt14
from experiments.translation.corpus import LANGUAGES, LazyPairs


@pytest.fixture(autouse=True)
def data_dir(tmp_path, monkeypatch):
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
  return tmp_path


@pytest.fixture
def tensorflow(monkeypatch):
  """Simulates TensorFlow and the network."""
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
  monkeypatch.setattr(requests, "head", lambda url, timeout: None)


@pytest.fixture
def small(monkeypatch, tensorflow):
  """Prepares three pairs per split instead of downloading."""

  def examples(self, split):
    foreign, english = self.builder_config.language_pair
    for number in range(3):
      yield number, {english: f"{split} {number}", foreign: f"{split} ü {number}"}

  def splits(self, dl_manager):
    return {split: examples(self, split) for split in ("train", "validation", "test")}

  monkeypatch.setattr(tfds.translate.Wmt14Translate, "_split_generators", splits)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("languages", LANGUAGES["wmt14"])
def test_prepared_data_are_text_of_the_right_split_and_side(languages, monkeypatch):
  names = {"train": "train", "valid": "validation", "test": "test"}
  for split, pairs in wmt14.load(languages).splits.items():
    both = [(f"{names[split]} {i}", f"{names[split]} ü {i}") for i in range(3)]
    wanted = both if languages.startswith("en") else [pair[::-1] for pair in both]
    assert isinstance(pairs, LazyPairs)
    assert sorted(pairs) == wanted
    assert [pairs[i] for i in range(3)] == list(pairs)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  assert len(wmt14.load(languages).splits["test"]) == 3  # reading needs no TensorFlow


def test_no_tensorflow_names_the_extra_and_the_other_way(monkeypatch, data_dir):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  message = refusal(wmt14.load)
  assert message.startswith(
    f"wmt14_translate is not in {data_dir}; preparing it needs TensorFlow"
  )
  assert "pip install -e '.[wmt14]'" in message and "TFDS_DATA_DIR" in message


@pytest.mark.usefixtures("tensorflow")
def test_what_cannot_be_downloaded_is_one_line(monkeypatch):
  def fail(self, dl_manager):
    raise tfds.download.download_manager.NonMatchingChecksumError(
      "X, has wrong checksum:\n* Got"
    )

  monkeypatch.setattr(tfds.translate.Wmt14Translate, "_split_generators", fail)
  message = refusal(wmt14.load)
  assert message.startswith("cannot prepare wmt14_translate in ")
  assert "X, has wrong checksum; set TFDS_DATA_DIR" in message
