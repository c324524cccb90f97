"""A user's own pairs: two aligned text files, or one file of two tab-separated columns."""

import pathlib

from relpos_jax.errors import InputError
from relpos_jax.files import local_path, read_content
from relpos_jax.translation.corpus import Corpus

_BOM = b"\xef\xbb\xbf"


def load(train: str = "", valid: str = "", test: str = "") -> Corpus:
  """Reads sentence pairs; a split is "source_file,target_file" or "file.tsv", plain or gzip.

  Line i of one file translates line i of the other; a line of a TSV file is source, tab, target.
  Files are UTF-8; lines end with \\n or \\r\\n. Pairs with an empty side are skipped and counted in
  the notes.

  Raises:
    InputError: a file is missing, unreadable or not UTF-8, two files differ in length, a line does
      not have two columns, or a split has no pairs.

  >>> import pathlib, tempfile
  >>> folder = pathlib.Path(tempfile.mkdtemp())
  >>> _ = (folder / "train.en").write_text("a dog runs\\n\\nit rains\\n")
  >>> _ = (folder / "train.de").write_text("ein Hund rennt\\nnichts\\nes regnet\\n")
  >>> corpus = load(train=f"{folder}/train.en,{folder}/train.de")
  >>> corpus.splits["train"]
  [('a dog runs', 'ein Hund rennt'), ('it rains', 'es regnet')]
  >>> corpus.notes
  ('pairs with an empty side skipped in train: 1',)
  """
  if not train:
    raise InputError('no training pairs: give train="source_file,target_file" or train="file.tsv"')
  named = {"train": train, "valid": valid, "test": test}
  splits, notes = {}, []
  for split, files in named.items():
    if not files:
      continue
    pairs = _read_pairs(files)
    splits[split] = [pair for pair in pairs if all(map(str.strip, pair))]
    if not splits[split]:
      raise InputError(f"no pairs in {split}: every line of {files} has an empty side")
    if skipped := len(pairs) - len(splits[split]):
      notes.append(f"pairs with an empty side skipped in {split}: {skipped}")
  return Corpus(splits, tuple(notes))


def _read_pairs(files: str) -> list[tuple[str, str]]:
  """Reads all pairs of "source_file,target_file" or "file.tsv", also those with an empty side."""
  paths = [local_path(name.strip()) for name in files.split(",")]
  sides = [read_lines(path) for path in paths]
  if len(paths) == 1:
    rows = [line.split("\t") if line.strip() else ["", ""] for line in sides[0]]
    for number, row in enumerate(rows, start=1):
      if len(row) != 2:
        raise InputError(
          f"{len(row)} columns in {paths[0]}, line {number}: give source, tab, target in every "
          "line, or two files as source_file,target_file"
        )
    return [(source, target) for source, target in rows]
  source, target = sides
  if len(source) != len(target):
    raise InputError(
      f"misaligned files: {paths[0]} has {len(source)} lines and {paths[1]} has {len(target)}; "
      "line i of one must translate line i of the other"
    )
  return list(zip(source, target, strict=True))


def read_lines(path: pathlib.Path) -> list[str]:
  """Reads the lines of a UTF-8 text file, plain or gzip, without line ends and byte order mark.

  Splits at \\n alone. str.splitlines would also split at U+2028, U+0085 or a lone \\r inside a
  sentence, which would shift all pairs after it.

  Raises:
    InputError: the file is missing, unreadable, or not UTF-8.
  """
  content = read_content(path).removeprefix(_BOM)
  try:
    text = content.decode()
  except UnicodeDecodeError as error:
    line = content.count(b"\n", 0, error.start) + 1
    raise InputError(f"invalid UTF-8 in {path}, line {line}: convert the file to UTF-8") from None
  lines = text.removesuffix("\n").split("\n")
  return [line.removesuffix("\r") for line in lines] if text else []
