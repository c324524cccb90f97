"""Tests that the command translate writes one line for every line, in order."""

import gzip
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from run_files import read_json

from configs import quickstart
from experiments import translate as translate_command
from experiments.data.tokenizer import (
  decode,
  encode,
  encode_pairs,
  load_tokenizer,
  train_tokenizer,
)
from experiments.systems import load_config
from experiments.translation.corpus import Corpus
from experiments.translation.data import learn_tokenizer
from experiments.translation.train import load_run
from experiments.translation.translator import make_translator

LINES = [
  "a man sees a tree.",
  "the cat finds the old green bike. " * 6,  # longer than any in training
  "",
  "Grüße, 世界! 🚲",
  "the dog",
  "  \t ",
  "the child hears the house.",
]
SHORT_LINES = [LINES[0], "", LINES[4], LINES[6]]


@pytest.fixture(scope="module")
def translate(call, workdir):
  """Returns a function that runs the command on bytes and returns its lines."""

  def translate(stdin: bytes, *arguments: str) -> list[str]:
    # A beam ends at once: the model is bad.
    flags = f"--workdir={workdir}", "--beam_size=1"
    answer = call("translate", *flags, *arguments, stdin=stdin)
    assert answer.status == 0, answer.err
    assert answer.out.endswith("\n") or not answer.out
    return answer.out.split("\n")[:-1]

  return translate


@pytest.fixture(scope="module")
def translations(translate):
  return translate("".join(f"{line}\n" for line in LINES).encode())


def test_every_line_has_its_translation(translations, workdir, fast):
  with fast():
    translator = make_translator(load_run(load_config(workdir), workdir), beam_size=1)
    assert translations == [translator([line])[0] for line in LINES]
  assert not any(translations[i] for i, line in enumerate(LINES) if not line.strip())
  assert len({*translations}) > 3  # or order would not be seen


NOT_IMPORTED = """
experiments.music experiments.graphs matplotlib sacrebleu
grain sacremoses scipy tensorboardX tensorflow_datasets
"""


def test_a_line_loads_no_other_system_and_no_library_of_scores(workdir):
  module = ["-X", "importtime", "-m", "experiments.translate"]
  words = [sys.executable, *module, f"--workdir={workdir}"]
  pipes = dict(input="the dog\n", capture_output=True, text=True)
  answer = subprocess.run(words, check=True, **pipes)
  pattern = r"^import time:.*\| +(\S+)$"
  imported = {*re.findall(pattern, answer.stderr, re.MULTILINE)}
  assert "experiments.translation.translator" in imported
  assert not imported & {*NOT_IMPORTED.split()}
  assert "orbax" not in imported  # since the evaluation after training kept the average


def test_line_ends_a_byte_order_mark_and_packing_do_not_matter(
  translate, translations, tmp_path, monkeypatch
):
  monkeypatch.setenv("HOME", str(tmp_path))
  text = ("\ufeff" + "\r\n".join(SHORT_LINES)).encode()
  wanted = [translations[LINES.index(line)] for line in SHORT_LINES]
  assert translate(text) == wanted
  (tmp_path / "lines.gz").write_bytes(gzip.compress(text))
  assert translate(b"", "--input=~/lines.gz") == wanted
  assert translate(b"") == []


def test_a_long_line_is_truncated_with_a_warning(call, workdir):
  long = "the cat finds the old green bike. " * 50
  tokenizer = load_tokenizer(workdir)
  first = decode(tokenizer, encode(tokenizer, [long.strip()])[0][:12])
  lines = "the dog\n\n{}\nthe dog sees the house.\n"

  flags = f"--workdir={workdir}", "--max_source_length=12"
  answer = call("translate", *flags, stdin=lines.format(long).encode())

  assert re.search("line 3 has .* truncated to the first 12", answer.err), answer.err
  wanted = call("translate", flags[0], stdin=lines.format(first).encode())
  assert answer.out == wanted.out


def test_words_that_are_not_in_the_vocabulary_are_named(capsys):
  tokenizer = train_tokenizer(["jump twice and walk"], "words", size=100)
  read = translate_command._read
  assert read("jump twice\n", 1, tokenizer, longest=10) == "jump twice"
  assert read("jump  thrice and hop ", 2, tokenizer, 10) == "jump  thrice and hop"
  assert capsys.readouterr().err == "line 2: not in the vocabulary: thrice hop\n"


def test_more_checkpoints_than_are_kept_are_refused(call, workdir):
  answer = call("translate", f"--workdir={workdir}", "--average_checkpoints=4")
  answer.assert_refused("4, but only 3 are kept: give --average_checkpoints=3 or less")


def test_a_run_older_than_the_choice_stops_at_the_bound_as_it_did(workdir, tmp_path):
  assert load_config(workdir).decoding.stop == "present"
  config = read_json(workdir / "config.json")
  assert config["decoding"].pop("stop") == "present"
  (tmp_path / "config.json").write_text(json.dumps(config))
  assert load_config(tmp_path).decoding.stop == "bound"


def test_training_strips_lines_as_translating_does():
  pairs = 4 * [("a dog runs", "ein Hund rennt"), ("it rains", "es regnet")]
  spaced = [(f"{source}\t", f"\u3000 {target}\u3000 ") for source, target in pairs]
  tokenizer = learn_tokenizer(quickstart.get_config(), Corpus(dict(train=pairs)))
  ours, theirs = (encode_pairs(tokenizer, x) for x in (spaced, pairs))
  for side, other in zip(ours, theirs, strict=True):
    np.testing.assert_array_equal(side.values, other.values)
