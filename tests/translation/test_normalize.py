"""Normalisation reproduces upstream's preprocessing; lazy equals eager."""

import gzip
import html

import pytest

from relpos_jax.data.builders import LazyPairs
from relpos_jax.translation.corpus import Corpus



def _lines(path):
  return gzip.decompress(path.read_bytes()).decode().removesuffix("\n").split("\n")


@pytest.mark.parametrize("language", ["en", "de"])
def test_raw_captions_become_upstreams_tokenised_ones(shared_data, language):
  for split in "train", "val", "test_2016_flickr":
    raw = _lines(shared_data / "multi30k" / "raw" / f"{split}.{language}.gz")
    tok = _lines(shared_data / "multi30k" / "tok" / f"{split}.lc.norm.tok.{language}.gz")
    assert normalize_lines(raw, language, lowercase=True) == [html.unescape(line) for line in tok]


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


def test_lowercase_is_the_lower_case_of_letters():
  assert normalize_lines(["ÄRGER im Haus!"], "de", lowercase=True) == ["ärger im haus !"]
  assert normalize_lines(["ÄRGER im Haus!"], "de", moses=False, lowercase=True) == [
    "ärger im haus!"
  ]
  assert normalize_lines(["ÄRGER im Haus!"], "de") == ["ÄRGER im Haus !"]


@pytest.mark.parametrize("how", [{}, {"lowercase": True}, {"moses": False, "lowercase": True}])
def test_a_corpus_is_normalised_by_the_rules_of_each_side(how):
  pairs = [("It's Dr. No.", "Er ist's."), ("Mr. X's.", "Hr. Xs: „Ja.“")]
  english, german = zip(*pairs, strict=True)
  sides = normalize_lines(english, "en", **how), normalize_lines(german, "de", **how)
  corpus = normalize_corpus(Corpus({"train": pairs}, ("a note",)), "en-de", **how)
  assert corpus.splits["train"] == list(zip(*sides, strict=True))
  assert corpus.notes == ("a note",)


def test_a_split_on_disk_is_normalised_as_it_is_read():
  read = set()
  lazy = LazyPairs(range(1000), lambda number: read.add(number) or (f"A{number}.", "Ja."))
  split = normalize_corpus(Corpus({"train": lazy}), "en-de").splits["train"]
  assert len(split) == 1000
  assert len(read) < 10  # Checking types in tests looks at some.
  assert split[7] == ("A7 .", "Ja .")
