"""What a run prints at its end: its BLEU and some translations."""

import io
from collections.abc import Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from relpos_jax.evaluation.bleu import Score


class BleuRow(NamedTuple):
  """The two scores of one split of the corpus."""

  split: str
  num_sentences: int
  sacrebleu: Score
  paper: Score


class Sample(NamedTuple):
  """A sentence, its translation by a person and that of the model."""

  source: str
  reference: str
  translation: str


def bleu_table(rows: Sequence[BleuRow]) -> Group:
  """Both BLEU scores, a split a row, and beneath them their signatures.

  >>> row = BleuRow("test", 1000, Score(36.62, "tok:13a"), Score(37.05, "tok:moses-de+hyphens"))
  >>> print(plain_text(bleu_table([row])))
    split   sentences   sacreBLEU   paper's BLEU
   ──────────────────────────────────────────────
    test        1,000       36.62          37.05
  <BLANKLINE>
  sacreBLEU: tok:13a
  paper's BLEU: tok:moses-de+hyphens
  """
  table = Table("split", box=SIMPLE_HEAD)
  for name in ("sentences", "sacreBLEU", "paper's BLEU"):
    table.add_column(name, justify="right")
  for split, num_sentences, sacrebleu, paper in rows:
    table.add_row(Text(split), f"{num_sentences:,}", f"{sacrebleu.value:.2f}", f"{paper.value:.2f}")
  signatures = [f"sacreBLEU: {row.sacrebleu.signature}" for row in rows]
  signatures += [f"paper's BLEU: {row.paper.signature}" for row in rows]
  return Group(table, *[Text(line, style="dim") for line in dict.fromkeys(signatures)])


def samples(triples: Sequence[Sample | tuple[str, str, str]]) -> Group:
  """Sentences, references and translations one below the other, wrapped beside their names.

  >>> dog = Sample("A dog is sleeping.", "Ein Hund schläft.", "Der Hund schläft.")
  >>> print(plain_text(samples([dog])))
  source       A dog is sleeping.
  reference    Ein Hund schläft.
  translation  Der Hund schläft.
  """
  blocks: list[RenderableType] = []
  for triple in triples:
    block = Table.grid(padding=(0, 2, 0, 0))
    for name, sentence in zip(Sample._fields, triple, strict=True):
      # Text, because brackets in a sentence are no markup.
      block.add_row(Text(name, style="dim"), Text(sentence))
    blocks += [block, ""]
  return Group(*blocks[:-1])


def plain_text(renderable: RenderableType, width: int = 100) -> str:
  """What would be printed, without colours, for files and logs.

  >>> plain_text(Text("ein Hund", style="bold red"), width=5)
  'ein\\nHund'
  """
  file = io.StringIO()
  console = Console(file=file, width=width, color_system=None, force_jupyter=False)
  console.print(renderable)
  lines = [line.rstrip() for line in file.getvalue().splitlines()]
  return "\n".join(lines).strip("\n")
