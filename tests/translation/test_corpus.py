"""Corpora are as recorded or published; lazy splits equal lists; normalisation is upstream's."""

import gzip
import hashlib
import html

import pytest
from faults import refusal

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
from experiments.translation.data import check, load_data, normalize


@pytest.fixture(scope="module")
def splits():
  return load_embedded().splits


@pytest.mark.parametrize("name", ["train", "valid", "test", "long"])
def test_embedded_text_is_as_the_readme_says(splits, name):
  text = "".join(f"{source}\t{target}\n" for source, target in splits[name])
  readme = (module._EMBEDDED / "README.md").read_text(encoding="utf-8")
  (row,) = [
    line for line in readme.splitlines() if line.startswith(f"| {name}.tsv.xz |")
  ]
  assert f"| {len(splits[name]):,} |" in row
  assert hashlib.sha256(text.encode()).hexdigest() in row


def test_train_size_takes_the_first_pairs_and_leaves_the_other_splits(splits):
  few = load_embedded(train_size=7).splits
  assert few == {**splits, "train": splits["train"][:7]}


class _BulkOnly(list):
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
  assert (
    [*lazy]
    == [*LazyPairs(_BulkOnly(numbers), str)]
    == [lazy[i] for i in numbers]
    == eager
  )


def _lines(path):
  return gzip.decompress(path.read_bytes()).decode().removesuffix("\n").split("\n")


@pytest.mark.parametrize("language", ["en", "de"])
def test_raw_captions_become_upstreams_tokenised_ones(shared_data, language):
  for split in "train", "val", "test_2016_flickr":
    raw = _lines(shared_data / "multi30k" / "raw" / f"{split}.{language}.gz")
    tok = _lines(
      shared_data / "multi30k" / "tok" / f"{split}.lc.norm.tok.{language}.gz"
    )
    assert normalize_lines(raw, language, lowercase=True) == [
      html.unescape(line) for line in tok
    ]


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
  pairs = [("It's Dr. No.", "Er ist's."), ("Mr. X's.", "Hr. Xs: „Ja.“")]
  english, german = zip(*pairs, strict=True)
  sides = normalize_lines(english, "en", **how), normalize_lines(german, "de", **how)
  corpus = normalize(make_config(**how), Corpus({"train": pairs}, ("a note",)))
  assert corpus.splits["train"] == list(zip(*sides, strict=True))
  assert corpus.notes == ("a note",)


def test_a_tokenizer_that_is_not_installed_is_named_before_training(monkeypatch):
  monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ko_mecab.MeCab", None)
  config = make_config()
  config.evaluation.tokenize = "ko-mecab"
  check(config, dict(data=1, fsdp=1, tensor=1, sequence=1))
  assert "pip install -e '.[ko]'" in refusal(load_data, config)


def test_a_split_on_disk_is_normalised_as_it_is_read():
  read = set()
  lazy = LazyPairs(
    range(1000), lambda number: read.add(number) or (f"A{number}.", "Ja.")
  )
  split = normalize(make_config(), Corpus({"train": lazy})).splits["train"]
  assert len(split) == 1000
  assert len(read) < 10  # Checking types in tests looks at some.
  assert split[7] == ("A7 .", "Ja .")


# Published files: `test_upstream` checks downloads.


@pytest.mark.parametrize(
  "languages, prepared",
  [
    *((pair, False) for pair in LANGUAGES["multi30k"]),
    ("en-de", True),
    ("de-en", True),
  ],
)
def test_files_of_multi30k_become_pairs(languages, prepared, tmp_path, publish):
  source, target = languages.split("-")
  (folder := tmp_path / "raw").mkdir()
  wanted = {}
  for split, name in (module._PREPARED if prepared else module._CAPTIONS).items():
    wanted[split] = [
      (f"{source}@@ {split} \u2028 ü {i}", f"{target} {i}") for i in range(3)
    ]
    for language, lines in zip(
      (source, target), zip(*wanted[split], strict=True), strict=True
    ):
      content = ("\n".join(lines) + "\n").encode()
      content = content if prepared else gzip.compress(content)
      (folder / name.format(language)).write_bytes(content)
  publish(module, "PREPARED" if prepared else "CAPTIONS", folder)
  assert load_multi30k(languages, str(folder), prepared).splits == wanted


def test_files_of_scan_become_commands_and_actions(tmp_path, publish, monkeypatch):
  monkeypatch.setattr(module, "_SCAN_HELD_OUT", 2)
  pairs = [(f"run {number}", " ".join(["I_RUN"] * number)) for number in range(1, 10)]
  lines = [f"IN: {command} OUT: {actions}\n" for command, actions in pairs]
  (folder := tmp_path / "scan").mkdir()
  for name, of in dict(train=lines[:7], test=lines[7:]).items():
    (folder / f"tasks_{name}_length.txt").write_text("".join(of))
  publish(module, "SCAN", folder)
  splits = load_scan(str(folder)).splits
  sizes = {split: len(of) for split, of in splits.items()}
  assert sizes == dict(train=3, valid=2, within=2, test=2)
  held_out = [pair for split in ("train", "valid", "within") for pair in splits[split]]
  assert (
    sorted(held_out) == pairs[:7] != held_out and sorted(splits["test"]) == pairs[7:]
  )
