r"""Translates lines with a trained model, in order, from a file or stdin to stdout.

  echo "The old teacher reads a book." \
      | python -m experiments.translate --workdir=runs/quickstart
  python -m experiments.translate --workdir=runs/multi30k \
      --input=captions.en > captions.de

The text must be UTF-8. If the model was trained on subwords, give it text in subwords.
"""

import functools
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from experiments import command
from experiments.errors import InputError
from experiments.files import Path, to_path

_LINES_AT_ONCE = 1024

FLAGS = dict(
  workdir=command.WORKDIR,
  input=command.Flag(
    "-", "a text file with a sentence a line, plain or compressed; -: stdin"
  ),
  beam_size=command.Flag(
    0,
    "hypotheses per sentence; 1: greedy, 0: as in the run's config",
    least=0,
    most=1024,
  ),
  max_source_length=command.Flag(
    1024, "longer lines are cut to this many tokens, with a warning", least=1
  ),
  average_checkpoints=command.AVERAGE,
)


def main(
  workdir: Path,
  input: str,
  beam_size: int,
  max_source_length: int,
  average_checkpoints: int,
) -> None:
  """Prints the translation of each line; an empty line gives an empty line."""
  from experiments.systems import load_config
  from experiments.training.metrics import track
  from experiments.translation.corpus import read_lines
  from experiments.translation.data import normalize_line
  from experiments.translation.scores import join
  from experiments.translation.train import load_run
  from experiments.translation.translator import make_translator

  lines = _stdin_lines() if input == "-" else iter(read_lines(to_path(input)))
  config = load_config(workdir, "translation", average_checkpoints)
  run = load_run(config, workdir)
  changes = dict(beam_size=beam_size) if beam_size else {}
  if not sys.stdout.isatty():
    changes["track"] = functools.partial(track, what="sentences")
  translate = make_translator(run, **changes)
  mark = config.evaluation.subword_mark
  size = 1 if input == "-" and sys.stdin.isatty() else _LINES_AT_ONCE
  number = 1
  while chunk := list(itertools.islice(lines, size)):
    texts = []
    for i, line in enumerate(chunk, number):
      text = normalize_line(config.data, line)
      texts.append(_read(text, i, run.vocabulary, max_source_length))
    print(*join(translate(texts), mark), sep="\n", flush=True)
    number += len(chunk)


def _read(line: str, number: int, tokenizer: Any, longest: int) -> str:
  """Prepares a line for translation; warns on stderr if some of its text is lost.

  A line of more than `longest` tokens is cut to its first `longest` tokens. Words that
  are not in the vocabulary are lost, too. Warnings name them and the line's `number`.
  """
  from experiments.data.tokenizer import UNK

  line = line.strip()
  encoding = tokenizer.encode(line, add_special_tokens=False)
  if UNK in encoding.ids:  # only in vocabularies of words
    tokens = zip(encoding.ids, encoding.offsets, strict=True)
    words = " ".join(line[start:end] for token, (start, end) in tokens if token == UNK)
    print(f"line {number}: not in the vocabulary: {words}", file=sys.stderr)
  if len(encoding) > longest:
    line = line[: encoding.offsets[longest - 1][1]]
    print(
      f"line {number} has {len(encoding):,} tokens: truncated to the first "
      f"{longest:,}, see --max_source_length",
      file=sys.stderr,
    )
  return line


def _stdin_lines() -> Iterator[str]:
  """Yields the lines of stdin; see `read_lines`."""
  for number, line in enumerate(sys.stdin.buffer, start=1):
    try:
      text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
      raise InputError(
        f"invalid UTF-8 in line {number} of stdin: convert it to UTF-8"
      ) from None
    yield text.removesuffix("\n").removesuffix("\r")


if __name__ == "__main__":
  command.run(main, FLAGS)
