"""Corpora are as published; lazy splits equal lists; normalisation is upstream's."""

import gzip
import hashlib
import html
import pathlib

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
  normalize_lines,
)
from experiments.translation.data import normalize


@pytest.fixture(scope="module")
def splits():
  return load_embedded().splits


@pytest.mark.parametrize("name", ["train", "valid", "test", "long"])
def test_embedded_text_is_as_the_readme_says(splits, name):
  text = "".join(f"{source}\t{target}\n" for source, target in splits[name])
  readme = pathlib.Path(module.__file__).with_name("embedded") / "README.md"
  lines = readme.read_text(encoding="utf-8").splitlines()
  (row,) = [line for line in lines if line.startswith(f"| {name}.tsv.xz |")]
  assert f"| {len(splits[name]):,} |" in row
  assert hashlib.sha256(text.encode()).hexdigest() in row


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
def test_raw_captions_become_upstreams_tokenised_ones(shared_data, language):
  for split in "train", "val", "test_2016_flickr":
    folder = shared_data / "multi30k"
    raw = read(folder / "raw" / f"{split}.{language}.gz")
    tokens = read(folder / "tok" / f"{split}.lc.norm.tok.{language}.gz")
    wanted = [html.unescape(line) for line in tokens]
    assert normalize_lines(raw, language, lowercase=True) == wanted


def test_line_end_and_apostrophes_are_treated_as_the_perl_scripts_do():
  assert normalize_lines(["er sagt: „Tee.“"], "de") == ['er sagt : " Tee " .']
  assert normalize_lines(["„Hook ’em“-Zeichen"], "de") == ['" Hook " em " -Zeichen']


@pytest.mark.parametrize("language", ["en", "de", "fr"])
def test_one_line_stays_one_line(language):
  lines = ["", " ", "a\u2028b\x85c\tda\u00a0e", 'He said: "(...) [a|b] & <c>".']
  normalised = normalize_lines(lines, language)
  assert len(normalised) == len(lines)
  assert normalised == [" ".join(line.split()) for line in normalised]
  assert not any("&amp;" in line or "&quot;" in line for line in normalised)


def make_config(**how):
  config = default.get_config()
  config.data.update(dict(moses=True) | how)
  return config


@pytest.mark.parametrize(
  "how", [{}, {"lowercase": True}, {"moses": False, "lowercase": True}]
)
def test_a_corpus_is_normalised_by_the_rules_of_each_side(how):
  english, german = ["It's Dr. No.", "Mr. X's."], ["Er ist's.", "Hr. Xs: „Ja.“"]
  pairs = [*zip(english, german, strict=True)]
  corpus = normalize(make_config(**how), Corpus({"train": pairs}, ("a note",)))
  sides = [*zip(*corpus.splits["train"], strict=True)]
  assert [*sides[0]] == normalize_lines(english, "en", **how)
  assert [*sides[1]] == normalize_lines(german, "de", **how)
  assert corpus.notes == ("a note",)


def test_a_split_on_disk_is_normalised_as_it_is_read():
  numbers = []

  def read_pair(number):
    numbers.append(number)
    return f"A{number}.", "Ja."

  lazy = LazyPairs(range(1000), read_pair)
  split = normalize(make_config(), Corpus({"train": lazy})).splits["train"]
  assert len(split) == 1000
  assert len(numbers) < 10  # Checking types in tests looks at some.
  assert split[7] == ("A7 .", "Ja .")


# Published files: `test_upstream` checks downloads.

CAPTIONS = dict(train="train.{}.gz", valid="val.{}.gz", test="test_2016_flickr.{}.gz")
PREPARED = dict(train="train.{}", valid="valid.{}", test="test.2016.{}")


def write_files(folder, names, languages) -> dict:
  """Writes three lines of each split and language; returns the pairs."""
  pairs = {}
  for split, name in names.items():
    sides = [[f"{x}@@ {split} \u2028 ü {i}" for i in range(3)] for x in languages]
    pairs[split] = [*zip(*sides, strict=True)]
    for language, lines in zip(languages, sides, strict=True):
      content = ("\n".join(lines) + "\n").encode()
      packed = gzip.compress(content) if name.endswith(".gz") else content
      (folder / name.format(language)).write_bytes(packed)
  return pairs


@pytest.mark.parametrize("languages", LANGUAGES["multi30k"])
def test_files_of_multi30k_become_pairs(languages, tmp_path, publish):
  pairs = write_files(tmp_path, CAPTIONS, languages.split("-"))
  publish(module, "CAPTIONS", tmp_path)
  assert load_multi30k(languages, str(tmp_path)).splits == pairs


def test_files_of_scan_become_commands_and_actions(tmp_path, publish, monkeypatch):
  monkeypatch.setattr(module, "_SCAN_HELD_OUT", 2)
  pairs = [(f"run {number}", " ".join(["I_RUN"] * number)) for number in range(1, 10)]
  lines = [f"IN: {command} OUT: {actions}\n" for command, actions in pairs]
  (tmp_path / "tasks_train_length.txt").write_text("".join(lines[:7]))
  (tmp_path / "tasks_test_length.txt").write_text("".join(lines[7:]))
  publish(module, "SCAN", tmp_path)
  splits = load_scan(str(tmp_path)).splits
  sizes = {split: len(pairs) for split, pairs in splits.items()}
  assert sizes == dict(train=3, valid=2, within=2, test=2)
  held_out = [*splits["train"], *splits["valid"], *splits["within"]]
  assert sorted(held_out) == pairs[:7]
  assert held_out != pairs[:7]
  assert sorted(splits["test"]) == pairs[7:]
