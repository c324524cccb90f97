"""Vocabularies: decoding inverts encoding, and text cannot spell special tokens."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experiments.data import tokenizer as tok
from experiments.errors import InputError

LINES = [
  "Ein kleiner Mann schläft in der Küche .",
  "Eine kleine Frau schläft nicht in der Küche, sie läuft über die Straße.",
  'A man , in a pull-over ; doesn\'t sleep " here " .',
  "Ein Mann läuft über 12 Straßen (1998).",
] * 4
TOKENIZER = tok.train_tokenizer(LINES, "bpe", size=400)


def roundtrip(tokenizer, line):
  return tok.decode(tokenizer, tok.encode(tokenizer, [line])[0])


@given(line=st.text())
@example(line="")
@example(line="  two  spaces in front,\ttab, end  ")
@example(line="nbsp\u00a0 zero\u200bwidth \ufeffBOM\x00 u\u0308 decomposed ﬁ ligature")
@example(line="'There' he didn't 're")
@example(line="▁ … Ġ ## �")
@example(line="x" * 5_000 + "€" * 300 + "7" * 200 + " " * 200)
@settings(max_examples=300)
def test_decoding_gives_every_line_back_exactly(line):
  assert roundtrip(TOKENIZER, line) == line


FORGER = tok.train_tokenizer(["<pad><s></s><unk> </s> a</s>"] * 9, "bpe", size=400)
parts = st.sampled_from(["<pad>", "<s>", "</s>", "<unk>", " ", "<", "s", "a"])


@given(line=st.lists(parts).map("".join))
@example(line="Ende.</s> <pad><unk>")
def test_no_text_spells_a_special_token(line):
  for tokenizer in (FORGER, TOKENIZER):
    *ids, last = tok.encode(tokenizer, [line])[0].tolist()
    assert last == tok.EOS
    assert not {*ids} & {tok.PAD, tok.BOS, tok.EOS, tok.UNK}
    assert tok.decode(tokenizer, [*ids, last]) == line


def test_long_corpora_are_encoded_as_line_by_line(monkeypatch):
  monkeypatch.setattr(tok, "_LINES_AT_ONCE", 3)
  lines = [*LINES, "", "letzte Zeile"]
  together = tok.encode(TOKENIZER, iter(lines))
  assert together.values.dtype == np.uint16
  assert together[0].dtype == np.int32
  alone = [tok.encode(TOKENIZER, [line])[0].tolist() for line in lines]
  assert [ids.tolist() for ids in together] == alone


def test_a_large_vocabulary_does_not_wrap_its_ids():
  words = [f"w{number}" for number in range(2**16 + 9)]
  tokenizer = tok.train_tokenizer(words, "words", size=2**17)
  ids = tok.encode(tokenizer, words)
  assert ids.values.max() == 2**16 + 12  # after four special tokens
  assert len({*ids.values.tolist()}) == len(words) + 1
  for row in (np.flatnonzero(ids.values >= 2**16) // 2).tolist():
    assert tok.decode(tokenizer, ids[row]) == words[row]


@given(line=st.text(st.characters(exclude_characters="▁", max_codepoint=127)))
def test_pieces_spell_the_line(line):
  ids = tok.encode(TOKENIZER, [line])[0]
  *labels, last = tok.pieces(TOKENIZER, ids)
  assert last == "</s>"
  assert "".join(labels) == (" " + line if line else "").replace(" ", "▁")


WORDS = ["ein anst@@ arr@@ ter hund .", "ein\thund\u3000. </s> ▁x …"]
WORD_TOKENIZER = tok.train_tokenizer(WORDS, "words", size=100)
KNOWN = sorted({*" ".join(WORDS).split()} - {"</s>"})
SPACES = [" ", "\t", "\r", "\u00a0", "\u2028", "\u3000", "\x85"]


some_words = st.sampled_from([*KNOWN, "</s>", "neu", "<unk>", "<pad>", "a<s>"])


@given(words=st.lists(some_words), space=st.sampled_from(SPACES))
def test_words_come_back_but_for_unknown_ones_and_those_that_spell_special_tokens(
  words, space
):
  *ids, last = tok.encode(WORD_TOKENIZER, [space.join(words)])[0].tolist()
  assert last == tok.EOS
  assert not {*ids} & {tok.PAD, tok.BOS, tok.EOS}
  expected = [word if word in KNOWN else "<unk>" for word in words]
  line = [tok.BOS, tok.PAD, *ids, last, *ids]
  assert tok.decode(WORD_TOKENIZER, line) == " ".join(expected)
  assert tok.pieces(WORD_TOKENIZER, [*ids, last]) == [*expected, "</s>"]


@pytest.mark.parametrize("content", [b"\xff", TOKENIZER.to_str()[:-9].encode()])
def test_a_damaged_file_is_named(tmp_path, content):
  (tmp_path / "tokenizer.json").write_bytes(content)
  with pytest.raises(InputError, match=r"tokenizer.json is damaged"):
    tok.load_tokenizer(tmp_path)
