"""Corpora are as published; lazy splits equal lists; normalisation is upstream's."""

import gzip
import hashlib
import html
import pathlib
import re

import pytest

from configs import default
from experiments.translation import corpus as module
from experiments.translation.corpus import (
  LANGUAGES,
  Corpus,
  LazyPairs,
  load_embedded,
  load_multi30k,
  load_scan,
  tokenize_moses,
)
from experiments.translation.data import normalize


@pytest.fixture(scope="module")
def splits():
  return load_embedded().splits


@pytest.mark.parametrize("name", ["train", "valid", "test", "long"])
def test_embedded_text_is_as_the_readme_says(splits, name):
  text = "".join(f"{source}\t{target}\n" for source, target in splits[name])
  digest = hashlib.sha256(text.encode()).hexdigest()
  readme = pathlib.Path(module.__file__).with_name("embedded") / "README.md"
  (row,) = re.findall(rf"\| {name}\.tsv\.xz \|.*", readme.read_text("utf-8"))
  assert f"| {len(splits[name]):,} |" in row
  assert digest in row


class BulkOnly(list):
  """A sequence that refuses to be iterated one by one."""

  def __getitems__(self, indices):
    return [self[index] for index in indices]

  def __iter__(self):
    raise AssertionError("read one by one")


@pytest.mark.parametrize("number", [0, 1, 6, 7])
def test_lazy_pairs_read_as_the_list_of_them_and_in_bulk(number, monkeypatch):
  monkeypatch.setattr(module, "_READ_AHEAD", 3)
  numbers = [*range(number)]
  lazy, eager = LazyPairs(numbers, str), [*map(str, numbers)]
  assert [*lazy] == eager
  assert [lazy[i] for i in numbers] == eager
  assert [*LazyPairs(BulkOnly(numbers), str)] == eager


def read(path):
  return gzip.decompress(path.read_bytes()).decode().removesuffix("\n").split("\n")


@pytest.mark.parametrize("language", ["en", "de"])
@pytest.mark.parametrize(
  "split", ["val", "test_2016_flickr", pytest.param("train", marks=pytest.mark.slow)]
)
def test_raw_captions_become_upstreams_tokenised_ones(shared_data, language, split):
  folder = shared_data / "multi30k"
  raw = read(folder / "raw" / f"{split}.{language}.gz")
  tokens = read(folder / "tok" / f"{split}.lc.norm.tok.{language}.gz")
  wanted = [html.unescape(line) for line in tokens]
  assert [tokenize_moses(line.lower(), language) for line in raw] == wanted


def test_line_end_and_apostrophes_are_treated_as_the_perl_scripts_do():
  assert tokenize_moses("er sagt: „Tee.“", "de") == 'er sagt : " Tee " .'
  assert tokenize_moses("„Hook ’em“-Zeichen", "de") == '" Hook " em " -Zeichen'


def make_config(**how):
  config = default.get_config()
  config.data.update(dict(moses=True) | how)
  return config


@pytest.mark.parametrize(
  "how, pair",
  [
    ({}, ("It 's Dr. No .", 'Hr . Xs : " Ja " .')),
    ({"moses": False, "lowercase": True}, ("it's dr. no.", "hr. xs: „ja.“")),
  ],
)
def test_a_corpus_is_normalised_by_the_rules_of_each_side(how, pair):
  corpus = Corpus({"train": [("It's Dr. No.", "Hr. Xs: „Ja.“")]}, ("a note",))
  found = normalize(make_config(**how).data, corpus)
  assert found.splits["train"] == [pair]
  assert found.notes == ("a note",)


# Published files: `test_upstream` checks downloads.


@pytest.mark.parametrize("languages", LANGUAGES["multi30k"])
def test_files_of_multi30k_become_pairs(languages, tmp_path, publish):
  names = dict(train="train", valid="val", test="test_2016_flickr")
  for name in names.values():
    for language in languages.split("-"):
      content = f"{language} {name} \u2028 ü\nnext\n".encode()
      (tmp_path / f"{name}.{language}.gz").write_bytes(gzip.compress(content))
  publish(module, "CAPTIONS", tmp_path)
  splits = load_multi30k(languages, str(tmp_path)).splits
  source, target = languages.split("-")
  for split, name in names.items():
    first = f"{source} {name} \u2028 ü", f"{target} {name} \u2028 ü"
    assert splits[split] == [first, ("next", "next")]


def test_files_of_scan_become_commands_and_actions(tmp_path, publish, monkeypatch):
  monkeypatch.setattr(module, "_SCAN_HELD_OUT", 2)
  pairs = [(f"run {number}", "I_RUN " * number + ".") for number in range(1, 10)]
  lines = [f"IN: {command} OUT: {actions}\n" for command, actions in pairs]
  (tmp_path / "tasks_train_length.txt").write_text("".join(lines[:7]))
  (tmp_path / "tasks_test_length.txt").write_text("".join(lines[7:]))
  publish(module, "SCAN", tmp_path)
  splits = load_scan(str(tmp_path)).splits
  sizes = {split: len(pairs) for split, pairs in splits.items()}
  assert sizes == dict(train=3, valid=2, within=2, test=2)
  known = splits["train"] + splits["valid"] + splits["within"]
  assert sorted(known) == pairs[:7] != known
  assert sorted(splits["test"]) == pairs[7:]
