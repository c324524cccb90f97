"""Translates a file of lines with CTranslate2 alone: `python -m experiments.benchmark.foreign`."""

import json
import sys
from collections.abc import Callable

import tokenizers


def make_translator(
  model: str, source: str, target: str, path: str, threads: int, options: dict
) -> Callable[[], list[str]]:
  """Returns a function that translates the lines of a file.

  `source` and `target` are tokenizers' files; `options` are those of `translate_batch`.
  """
  import ctranslate2  # of no extra: this module alone needs it

  translator = ctranslate2.Translator(model, intra_threads=threads, inter_threads=1)
  split, join = map(tokenizers.Tokenizer.from_file, (source, target))
  with open(path, encoding="utf-8") as file:
    lines = [line.strip() for line in file]

  def translate() -> list[str]:
    encoded = split.encode_batch(lines, add_special_tokens=False)
    found = translator.translate_batch([[*line.tokens, "</s>"] for line in encoded], **options)
    ids = [[join.token_to_id(token) for token in line.hypotheses[0]] for line in found]
    return join.decode_batch(ids)

  return translate


if __name__ == "__main__":
  *files, threads, options = sys.argv[1:]
  print(*make_translator(*files, int(threads), json.loads(options))(), sep="\n")
