"""WMT 2014: splits as in TFDS, read lazily; errors name the remedy."""

import importlib.util
from unittest import mock

import pytest
import requests
import tensorflow_datasets as tfds
from faults import refusal

from experiments.translation import wmt14
from experiments.translation.corpus import LazyPairs


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
@pytest.mark.parametrize("languages", ["en-de", "fr-en"])
def test_prepared_data_are_text_of_the_right_split_and_side(languages, monkeypatch):
  splits = wmt14.load(languages).splits
  for split, name in dict(train="train", valid="validation", test="test").items():
    pairs = [(f"{name} {i}", f"{name} ü {i}") for i in range(3)]
    if languages == "fr-en":
      pairs = [pair[::-1] for pair in pairs]
    assert isinstance(splits[split], LazyPairs)
    assert sorted(splits[split]) == sorted(pairs)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  assert len(wmt14.load(languages).splits["test"]) == 3  # reading needs no TensorFlow


def test_no_tensorflow_names_the_extra_and_the_other_way(monkeypatch, data_dir):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  message = refusal(wmt14.load)
  absent = f"wmt14_translate is not in {data_dir}"
  assert message.startswith(f"{absent}; preparing it needs TensorFlow")
  assert "pip install -e '.[wmt14]'" in message
  assert "TFDS_DATA_DIR" in message


@pytest.mark.usefixtures("tensorflow")
def test_what_cannot_be_downloaded_is_one_line(monkeypatch):
  kind = tfds.download.download_manager.NonMatchingChecksumError
  fail = mock.Mock(side_effect=kind("X, has wrong checksum:\n* Got"))
  monkeypatch.setattr(tfds.translate.Wmt14Translate, "_split_generators", fail)
  message = refusal(wmt14.load)
  assert message.startswith("cannot prepare wmt14_translate in ")
  assert "X, has wrong checksum; set TFDS_DATA_DIR" in message
