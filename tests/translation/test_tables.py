"""The report loses nothing of what it is given, at any width and without a terminal."""

import io
import subprocess
import sys

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relpos_jax.evaluation.bleu import Score, corpus_bleu, paper_bleu
from relpos_jax.translation.tables import (
  BleuRow,
  Sample,
  bleu_table,
  plain_text,
  samples,
)

LONG = "Der alte Gärtner, der [sieben] rote Blumen gesehen hatte, ging ins Häuschen. " * 6
ROWS = [
  BleuRow("test", 1000, Score(36.624, "nrefs:1|tok:13a"), Score(37.0, "nrefs:1|tok:moses-de")),
  BleuRow("long", 267, Score(9.5, "nrefs:1|tok:13a"), Score(100.0, "nrefs:1|tok:moses-de")),
]


def test_the_table_holds_every_figure():
  text = plain_text(bleu_table(ROWS))
  lines = [line.split() for line in text.splitlines()]
  assert ["test", "1,000", "36.62", "37.00"] in lines
  assert ["long", "267", "9.50", "100.00"] in lines


def test_every_signature_stands_beneath_once():
  text = plain_text(bleu_table(ROWS))
  assert text.count("nrefs:1|tok:13a") == text.count("nrefs:1|tok:moses-de") == 1
  other = ROWS[1]._replace(sacrebleu=Score(1.0, "nrefs:1|tok:none"))
  text = plain_text(bleu_table([ROWS[0], other]))
  assert "sacreBLEU: nrefs:1|tok:13a" in text and "sacreBLEU: nrefs:1|tok:none" in text


def test_real_signatures_are_not_broken_by_the_width_of_a_log():
  texts = ["Ein Hund schläft."], ["Der Hund schläft."]
  row = BleuRow("test", 1, corpus_bleu(*texts), paper_bleu(*texts, "de"))
  lines = plain_text(bleu_table([row]), width=80).splitlines()
  assert "sacreBLEU: " + row.sacrebleu.signature in lines


@pytest.mark.parametrize("width", [40, 80, 200])
def test_long_sentences_wrap_beside_their_names(width):
  text = plain_text(samples([Sample("A [bold]short[/bold] one.", LONG, LONG)] * 5), width)
  lines = text.splitlines()
  assert max(map(len, lines)) <= width
  assert sum(line.startswith("translation  ") for line in lines) == 5
  assert all(line[:13].strip() in ("", "source", "reference", "translation") for line in lines)
  words = " ".join(line[13:].strip() for line in lines).split()
  assert words == ("A [bold]short[/bold] one. " + LONG + LONG).split() * 5


def test_samples_are_parted_by_an_empty_line():
  text = plain_text(samples([("a", "b", "c"), ("d", "e", "f")]))
  assert text.split("\n\n") == [
    "source       a\nreference    b\ntranslation  c",
    "source       d\nreference    e\ntranslation  f",
  ]
  assert plain_text(samples([])) == ""


def test_an_untranslated_sentence_keeps_its_place():
  assert plain_text(samples([("a", "b", "")])).splitlines()[2] == "translation"


def test_no_colours_in_plain_text(monkeypatch):
  monkeypatch.setenv("FORCE_COLOR", "1")
  table = Table("x")
  table.add_row(Text("bold", style="bold red"))
  assert "\x1b" not in plain_text(table) + plain_text(bleu_table(ROWS)) + plain_text(samples(()))


def test_a_pipe_gets_neither_colours_nor_broken_lines():
  code = (
    "from rich.console import Console; from relpos_jax.translation.tables import *\n"
    "Console().print(samples([('Ein Käse [1] für 5 $', 'b', 'c')]))"
  )
  run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
  lines = [line.rstrip() for line in run.stdout.decode().splitlines()]
  assert lines == ["source       Ein Käse [1] für 5 $", "reference    b", "translation  c"]


def test_a_terminal_shows_the_same_words():
  console = Console(force_terminal=True, width=100, record=True, file=io.StringIO())
  console.print(bleu_table(ROWS))
  shown = "\n".join(line.rstrip() for line in console.export_text().splitlines())
  assert shown.strip("\n") == plain_text(bleu_table(ROWS))
