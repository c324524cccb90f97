"""Trains vocabularies, and converts text to token ids and back.

There are two kinds of vocabulary. The kind "bpe" has subwords of bytes, so it
represents any text without loss. Encoding adds a space before a line, and decoding
removes it. So a word has the same tokens at the start of a line and inside it. A token
ends where letters are followed by digits, signs or white space. So if a text has the
characters "</s>", they become several ordinary tokens, not the special token.

The kind "words" is for text that white space already divides into tokens. A token is
unknown if it is not in the vocabulary, or if it is spelled like a special token.
"""

import array
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from tokenizers import (
  Regex,
  Tokenizer,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
  trainers,
)

from experiments.errors import InputError
from experiments.files import Path, write_whole
from relpos_jax.typing import Int, Integer

KINDS = ("bpe", "words")
PAD, BOS, EOS, UNK = 0, 1, 2, 3
_SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# GPT-2's pattern, except that accents stay with their letter and words are limited to
# 64.
_WORDS = (
  r"'(?:s|t|re|ve|m|ll|d)(?![\p{L}\p{M}])"
  r"| ?[\p{L}\p{M}]{1,N}| ?\p{N}{1,N}| ?[^\s\p{L}\p{M}\p{N}]{1,N}|\s{1,N}(?!\S)|\s"
).replace("1,N", "1,64")
# Matches special tokens that are spelled in a text.
_SPELT = Regex(rf"(?<!\S)(?:{'|'.join(_SPECIAL)})(?!\S)")
_LINES_AT_ONCE = 16_384
FILE = "tokenizer.json"  # in a run directory


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged(Sequence):
  """Holds rows of unequal length in one array: millions of sentences fit into memory.

  Row i is `values[offsets[i] : offsets[i + 1]]`, as int32.
  """

  values: Integer[np.ndarray, "tokens"]
  offsets: Int[np.ndarray, "rows_and_one"]

  @classmethod
  def from_rows(cls, rows: Iterable[Sequence[int] | np.ndarray]) -> "Ragged":
    """Concatenates rows into one array."""
    arrays, lengths = [np.empty(0, np.int32)], []
    for row in rows:
      array = np.asarray(row, np.int32)
      arrays.append(array)
      lengths.append(len(array))
    return cls.from_lengths(np.concatenate(arrays), lengths)

  @classmethod
  def from_lengths(
    cls, values: Integer[np.ndarray, "n"], lengths: Sequence | np.ndarray
  ) -> "Ragged":
    """Divides concatenated values into rows of these lengths."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return cls(values, np.append(0, ends))

  @property
  def lengths(self) -> Int[np.ndarray, "rows"]:
    return np.diff(self.offsets)

  def in_epoch(self, epoch: int) -> "Ragged":
    """Returns itself, because the rows are the same in every epoch."""
    return self

  def __len__(self) -> int:
    return len(self.offsets) - 1

  def __getitem__(self, index: int) -> Int[np.ndarray, "tokens"]:
    row = range(len(self))[index]
    return self.values[self.offsets[row] : self.offsets[row + 1]].astype(np.int32)

  def pad(
    self, rows: Int[np.ndarray, "rows"], shape: tuple[int, int], padding: int
  ) -> Int[np.ndarray, "B L"]:
    """Returns the rows with the indices `rows` as an int32 array of shape [B, L].

    It is padded on the right and below.
    """
    result = np.full(shape, padding, np.int32)
    starts, ends = self.offsets[rows, None], self.offsets[rows + 1, None]
    positions = starts + np.arange(shape[1])
    real = positions < ends
    result[: len(rows)][real] = self.values[positions[real]]
    return result


def train_tokenizer(lines: Iterable[str], kind: str, size: int) -> Tokenizer:
  """Trains a vocabulary; the result is deterministic.

  Args:
    lines: the text of both languages. For "words" their order does not matter.
    kind: "bpe" learns merges of bytes (Sennrich et al. 2016). "words" takes the most
      frequent words; ties go to the first by code points.
    size: the largest number of entries. It includes the special tokens and, for "bpe",
      the 256 bytes.

  Raises InputError if the size is too small for the special tokens and the bytes.
  """
  options = dict(vocab_size=size, special_tokens=_SPECIAL, show_progress=False)
  if kind == "words":
    learner = _pipeline(models.WordLevel(unk_token=_SPECIAL[UNK]))
    learner.normalizer = normalizers.Replace(_SPELT, "")
    trainer = trainers.WordLevelTrainer(min_frequency=1, **options)
  else:
    smallest = len(_SPECIAL) + len(_ALPHABET)
    if size < smallest:
      raise InputError(
        f"vocabulary size {size}: choose at least {smallest}, for tokens of all bytes"
      )
    learner = _pipeline(models.BPE())
    trainer = trainers.BpeTrainer(
      min_frequency=2, initial_alphabet=_ALPHABET, **options
    )
  learner.train_from_iterator(lines, trainer)
  # A new pipeline, because the trained one would recognise special tokens in text.
  return _pipeline(learner.model)


def _pipeline(model: models.Model) -> Tokenizer:
  """Builds a tokenizer around a model: a vocabulary of words, or of subwords of bytes.

  The tokenizer splits text into words for the model, appends EOS, and decodes tokens.
  """
  tokenizer = Tokenizer(model)
  tokenizer.post_processor = processors.TemplateProcessing(
    single="$A </s>", special_tokens=[("</s>", EOS)]
  )
  if isinstance(model, models.WordLevel):
    tokenizer.normalizer = normalizers.Replace(_SPELT, _SPECIAL[UNK])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer
  tokenizer.normalizer = normalizers.Prepend(" ")
  words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
  in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, in_bytes])
  without_space = decoders.Strip(" ", 1, 0)
  tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), without_space])
  return tokenizer


def encode(tokenizer: Tokenizer, lines: Iterable[str]) -> Ragged:
  """Converts lines to token ids, with EOS and without BOS.

  Reads the lines lazily, and stores two bytes per token, or four if the vocabulary has
  more than 65,536 entries. Uses all cores unless TOKENIZERS_PARALLELISM=false.
  """
  is_small = tokenizer.get_vocab_size() <= 2**16
  tokens = array.array("H" if is_small else "i")
  lengths = []
  remaining = iter(lines)
  for chunk in iter(lambda: [*itertools.islice(remaining, _LINES_AT_ONCE)], []):
    for encoding in tokenizer.encode_batch_fast(chunk):
      tokens.extend(encoding.ids)
      lengths.append(len(encoding.ids))
  return Ragged.from_lengths(np.asarray(tokens), lengths)


def encode_pairs(
  tokenizer: Tokenizer, pairs: Iterable[tuple[str, str]]
) -> tuple[Ragged, Ragged]:
  """Converts pairs to the token ids of their sources, and of their targets.

  White space around a sentence is removed.
  """
  sources = encode(tokenizer, (source.strip() for source, _ in pairs))
  targets = encode(tokenizer, (target.strip() for _, target in pairs))
  return sources, targets


def strip_special(tokens: Sequence[int] | np.ndarray) -> Int[np.ndarray, "_"]:
  """Returns the tokens before the first EOS, without BOS and PAD."""
  row = np.asarray(tokens, int)
  row = row[np.cumsum(row == EOS) == 0]
  return row[(row != PAD) & (row != BOS)]


def decode(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> str:
  """Converts token ids to text, up to the first EOS and without PAD and BOS.

  For "bpe", decoding inverts encoding, including all spaces. Bytes that form no
  character become U+FFFD. Tokens of the kind "words" are joined by one space.
  """
  return tokenizer.decode(strip_special(ids).tolist(), skip_special_tokens=False)


def pieces(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> list[str]:
  """Returns the text of each token, for labels of plots.

  A space becomes "▁", and a part of a character "�". Words stay as they are.
  """
  tokens = [tokenizer.id_to_token(token) for token in np.asarray(ids).tolist()]
  if isinstance(tokenizer.model, models.WordLevel):
    return tokens
  byte_level = decoders.ByteLevel()
  for index, token in enumerate(tokens):
    if token not in _SPECIAL:
      tokens[index] = byte_level.decode([token]).replace(" ", "▁")
  return tokens


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
  """Writes a tokenizer into a run directory, unless it already has one."""
  if not (folder / FILE).exists():
    write_whole(folder / FILE, tokenizer.to_str())


def load_tokenizer(folder: Path) -> Tokenizer:
  """Reads the tokenizer of a run directory; raises InputError if it cannot."""
  path = folder / FILE
  if not path.exists():
    raise InputError(
      f"no {FILE} in {folder}: restore it, or name the folder of a training run"
    )
  try:
    return Tokenizer.from_str(path.read_bytes().decode())
  except Exception as error:  # the type that HF tokenizers raises
    raise InputError(
      f"{path} is damaged: restore it, or train again in a new folder"
    ) from error
