"""Evaluation of translations: BLEU, counts by sentence, samples and attention maps."""

import functools
import io
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relpos_jax.data.batching import pair_lengths
from relpos_jax.data.tokenizer import BOS, Tokenizers, encode, encode_pairs, pieces
from relpos_jax.evaluation.bleu import (
  Score,
  corpus_bleu,
  join_subwords,
  paper_bleu,
  sentence_statistics,
)
from relpos_jax.evaluation.pictures import Panel, attention_heatmap
from relpos_jax.files import write_whole
from relpos_jax.models.seq2seq import Transformer
from relpos_jax.training.task import Evaluation, Run, own_copies
from relpos_jax.typing import Array, Float, Int, PyTree

_NUM_SAMPLES, _NUM_SAMPLES_IN_TRAINING = 5, 3

Pairs = Sequence[tuple[str, str]]


class Translated(NamedTuple):
  """The pairs of a split, the model's translations and the seconds they took."""

  pairs: Pairs
  translations: Sequence[str]
  seconds: float

  @property
  def references(self) -> list[str]:
    return [reference for _, reference in self.pairs]


class BleuRow(NamedTuple):
  """The two BLEU scores of one split."""

  split: str
  num_sentences: int
  sacrebleu: Score
  paper: Score


def translate(
  translator: Callable[[Sequence[str]], Sequence[str]], splits: Mapping[str, Pairs]
) -> dict[str, Translated]:
  """Translates every split."""
  translated = {}
  for split, pairs in splits.items():
    start = time.perf_counter()
    translations = translator([source for source, _ in pairs])
    translated[split] = Translated(pairs, translations, round(time.perf_counter() - start, 1))
  return translated


def score_validation(
  config: ConfigDict, pairs: Pairs, translations: Sequence[str]
) -> tuple[dict[str, float], str]:
  """Returns the sacreBLEU score and a few samples."""
  references = [reference for _, reference in pairs]
  bleu = corpus_bleu(translations, references, **config.evaluation)
  text = _samples(config, pairs, translations, _NUM_SAMPLES_IN_TRAINING)
  return dict(valid_bleu=bleu.value), text


def evaluate(run: Run, scored: Mapping[str, Translated], workdir: pathlib.Path) -> Evaluation:
  """Scores the translations of each split, writes them, and draws the attention of one."""
  if not scored:
    text = (
      "no test pairs to score: run the training command again "
      "with --config.data.pairs.test=source_file,target_file"
    )
    return Evaluation(text, {}, {}, {})
  for split, of in scored.items():
    text = "".join(f"{line}\n" for line in join_lines(run.config, of.translations))
    write_whole(workdir / f"{split}.translations.txt", text)
  rows = {
    split: score(run.config, split, of.translations, of.references) for split, of in scored.items()
  }
  sentences = {split: count_sentences(run, of) for split, of in scored.items()}
  text, pictures = bleu_table([*rows.values()]), ()
  if test := scored.get("test"):
    samples = _samples(run.config, test.pairs, test.translations, _NUM_SAMPLES)
    text, pictures = f"{text}\n\n{samples}", (_draw_example(run, test, workdir),)
  results = {split: _result(row, scored[split].seconds) for split, row in rows.items()}
  scores = {split: _scores(row) for split, row in rows.items()}
  return Evaluation(f"\n\n{text}\n\n", results, scores, sentences, pictures)


def is_prepared(config: ConfigDict) -> bool:
  """Returns whether the data are those of the published baseline, in Moses tokens and subwords."""
  return config.data.source == "multi30k" and config.data.multi30k.prepared


def join_lines(config: ConfigDict, lines: Sequence[str]) -> list[str]:
  """Joins subwords marked by `config.evaluation.subword_mark` into words."""
  return [join_subwords(line, config.evaluation.subword_mark) for line in lines]


def score(
  config: ConfigDict, split: str, translations: Sequence[str], references: Sequence[str]
) -> BleuRow:
  """Computes both BLEU scores of a split."""
  return BleuRow(
    split,
    len(references),
    corpus_bleu(translations, references, **config.evaluation),
    paper_bleu(
      translations,
      references,
      config.data.languages.partition("-")[2],
      tokenized=config.data.moses or is_prepared(config),
      subword_mark=config.evaluation.subword_mark,
    ),
  )


def count_sentences(run: Run, of: Translated) -> list[list[int]]:
  """Returns a row for each sentence: its length in tokens, and sacreBLEU's counts."""
  lengths = pair_lengths(*encode_pairs(run.vocabulary, of.pairs)) - 1  # without the end mark
  counts = sentence_statistics(of.translations, of.references, **run.config.evaluation)
  return np.column_stack([lengths, counts]).tolist()


def bleu_table(rows: Sequence[BleuRow]) -> str:
  """Formats both BLEU scores, one row per split, followed by their signatures.

  >>> row = BleuRow("test", 1000, Score(36.62, "tok:13a"), Score(37.05, "tok:moses-de+hyphens"))
  >>> print(bleu_table([row]))
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
    table.add_row(split, f"{num_sentences:,}", f"{sacrebleu.value:.2f}", f"{paper.value:.2f}")
  signatures = [f"sacreBLEU: {row.sacrebleu.signature}" for row in rows]
  signatures += [f"paper's BLEU: {row.paper.signature}" for row in rows]
  return "\n".join([_plain_text(table), "", *dict.fromkeys(signatures)])


def sample_table(samples: Sequence[Sequence[str]], width: int = 100) -> str:
  """Formats (source, reference, translation) triples, one below the other and wrapped.

  >>> print(sample_table([("A dog is sleeping.", "Ein Hund schläft.", "Der Hund schläft.")]))
  source       A dog is sleeping.
  reference    Ein Hund schläft.
  translation  Der Hund schläft.
  """
  blocks = []
  for sample in samples:
    block = Table.grid(padding=(0, 2, 0, 0))
    for name, sentence in zip(("source", "reference", "translation"), sample, strict=True):
      block.add_row(name, Text(sentence))  # a str would be parsed as markup
    blocks.append(_plain_text(block, width))
  return "\n\n".join(blocks)


def attention_panels(
  model: Transformer, tokenizers: Tokenizers, source: str, target: str
) -> list[Panel]:
  """Returns the attention of the encoder's first layer, and that from `target` to `source`.

  Weights are means over heads; those of the second panel are also means over layers. Each row of
  the second panel is the token that the decoder is about to write.
  """
  source_ids = encode(tokenizers.source, [source.strip()])[0]
  target_ids = encode(tokenizers.target, [target])[0]
  target_input = np.concatenate([[BOS], target_ids[:-1]])
  encoder, cross = _weights(*nnx.split(model), source_ids[None], target_input[None])
  source_words = pieces(tokenizers.source, source_ids)
  target_words = pieces(tokenizers.target, target_ids)
  return [
    Panel("self-attention, encoder layer 1", np.asarray(encoder), source_words, source_words),
    Panel("translation to source", np.asarray(cross), target_words, source_words),
  ]


@functools.partial(jax.jit, static_argnums=0)
def _weights(
  graphdef: nnx.GraphDef, state: PyTree, source: Int[Array, "1 S"], target: Int[Array, "1 T"]
) -> tuple[Float[Array, "S S"], Float[Array, "T S"]]:
  model = nnx.merge(graphdef, state)
  model.set_attributes(sow_weights=True, raise_if_not_found=False)
  _, sown = nnx.capture(model, nnx.Intermediate)(source, target)
  mean_over_heads = lambda attention: jnp.mean(attention["weights"][0][0], axis=0)
  cross = [mean_over_heads(x["cross_attention"]) for x in sown["decoder"]["layers"].values()]
  encoder = mean_over_heads(sown["encoder"]["layers"][0]["self_attention"])
  return encoder, jnp.mean(jnp.stack(cross), axis=0)


def draw_attention(run: Run, source: str, translation: str, path: str | pathlib.Path):
  """Draws the attention between a sentence and its translation; returns the path."""
  model = nnx.merge(run.graphdef, own_copies(run.params))
  return attention_heatmap(attention_panels(model, run.vocabulary, source, translation), path)


def _draw_example(run: Run, of: Translated, workdir: pathlib.Path) -> pathlib.Path:
  """Draws the attention of the sentence of median length among the samples."""
  examples = [*zip(of.pairs, of.translations, strict=True)][:_NUM_SAMPLES]
  (source, _), translation = sorted(examples, key=lambda x: len(x[0][0]))[len(examples) // 2]
  return draw_attention(run, source, translation, workdir / "attention.png")


def _samples(config: ConfigDict, pairs: Pairs, translations: Sequence[str], number: int) -> str:
  samples = [(*pair, line) for pair, line in zip(pairs, translations, strict=True)][:number]
  return sample_table([join_lines(config, sample) for sample in samples])


def _result(row: BleuRow, seconds: float) -> dict:
  scores = dict(sacrebleu=row.sacrebleu._asdict(), paper_bleu=row.paper._asdict())
  return dict(sentences=row.num_sentences, seconds=seconds, **scores)


def _scores(row: BleuRow) -> dict:
  signatures = dict(sacrebleu=row.sacrebleu.signature, paper_bleu=row.paper.signature)
  return dict(sacrebleu=row.sacrebleu.value, paper_bleu=row.paper.value, signatures=signatures)


def _plain_text(table: Table, width: int = 100) -> str:
  """Renders a table without colours."""
  file = io.StringIO()
  Console(file=file, width=width, color_system=None, force_jupyter=False).print(table)
  return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).strip("\n")
