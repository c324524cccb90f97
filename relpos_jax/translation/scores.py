"""What translations are worth: both BLEU scores, their parts by sentence, samples, attention."""

import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from relpos_jax.data.batching import pair_lengths
from relpos_jax.data.tokenizer import encode_pairs
from relpos_jax.evaluation.bleu import (
  corpus_bleu,
  join_subwords,
  paper_bleu,
  sentence_statistics,
)
from relpos_jax.evaluation.pictures import attention_heatmap
from relpos_jax.files import write_whole
from relpos_jax.training.task import Evaluation, Run, own_copies
from relpos_jax.translation.attention_panels import attention_panels
from relpos_jax.translation.tables import BleuRow, Sample, bleu_table, plain_text, samples

_SHOWN, _SHOWN_IN_SHORT = 5, 3

Pairs = Sequence[tuple[str, str]]


class Translated(NamedTuple):
  """A split, its translations, and the seconds they took."""

  pairs: Pairs
  translations: Sequence[str]
  seconds: float

  @property
  def references(self) -> list[str]:
    """What people translated."""
    return [reference for _, reference in self.pairs]


def translate(
  translator: Callable[[Sequence[str]], Sequence[str]], splits: Mapping[str, Pairs]
) -> dict[str, Translated]:
  """Translates every split."""
  found = {}
  for split, pairs in splits.items():
    start = time.perf_counter()
    translations = translator([source for source, _ in pairs])
    found[split] = Translated(pairs, translations, round(time.perf_counter() - start, 1))
  return found


def in_short(
  config: ConfigDict, pairs: Pairs, translations: Sequence[str]
) -> tuple[dict[str, float], str]:
  """SacreBLEU, and a few samples."""
  references = [reference for _, reference in pairs]
  bleu = corpus_bleu(translations, references, **config.evaluation)
  return dict(valid_bleu=bleu.value), _samples(config, pairs, translations, _SHOWN_IN_SHORT)


def evaluation(run: Run, scored: Mapping[str, Translated], workdir: pathlib.Path) -> Evaluation:
  """Writes and scores the translations, and draws where the model looked in one of them."""
  if not scored:
    text = (
      "no test pairs to score: the training's command again, "
      "with --config.data.pairs.test=source_file,target_file, scores them"
    )
    return Evaluation(text, {}, {}, {})
  for split, of in scored.items():
    text = "".join(f"{line}\n" for line in joined(run.config, of.translations))
    write_whole(workdir / f"{split}.translations.txt", text)
  rows = {
    split: score(run.config, split, of.translations, of.references) for split, of in scored.items()
  }
  sentences = {split: count_sentences(run, of) for split, of in scored.items()}
  text, pictures = plain_text(bleu_table([*rows.values()])), ()
  if test := scored.get("test"):
    shown = _samples(run.config, test.pairs, test.translations, _SHOWN)
    text, pictures = f"{text}\n\n{shown}", (_draw_middling(run, test, workdir),)
  results = {split: _result(row, scored[split].seconds) for split, row in rows.items()}
  scores = {split: _scores(row) for split, row in rows.items()}
  return Evaluation(f"\n\n{text}\n\n", results, scores, sentences, pictures)


def is_prepared(config: ConfigDict) -> bool:
  """Whether the text is the published baseline's, in Moses tokens and subwords."""
  return config.data.source == "multi30k" and config.data.multi30k.prepared


def joined(config: ConfigDict, lines: Sequence[str]) -> list[str]:
  """Lines for people to read: words, where the model has marked subwords."""
  return [join_subwords(line, config.evaluation.subword_mark) for line in lines]


def _samples(config: ConfigDict, pairs: Pairs, translations: Sequence[str], number: int) -> str:
  shown = [(*pair, line) for pair, line in zip(pairs, translations, strict=True)][:number]
  return plain_text(samples([Sample(*joined(config, triple)) for triple in shown]))


def score(
  config: ConfigDict, split: str, translations: Sequence[str], references: Sequence[str]
) -> BleuRow:
  """Both BLEU scores of a split's translations."""
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
  """Each sentence's row in the record: its length in tokens, and what sacreBLEU counts in it."""
  lengths = pair_lengths(*encode_pairs(run.vocabulary, of.pairs)) - 1  # the end mark
  counts = sentence_statistics(of.translations, of.references, **run.config.evaluation)
  return np.column_stack([lengths, counts]).tolist()


def _result(row: BleuRow, seconds: float) -> dict:
  scores = dict(sacrebleu=row.sacrebleu._asdict(), paper_bleu=row.paper._asdict())
  return dict(sentences=row.num_sentences, seconds=seconds, **scores)


def _scores(row: BleuRow) -> dict:
  signatures = dict(sacrebleu=row.sacrebleu.signature, paper_bleu=row.paper.signature)
  return dict(sacrebleu=row.sacrebleu.value, paper_bleu=row.paper.value, signatures=signatures)


def _draw_middling(run: Run, of: Translated, workdir: pathlib.Path) -> pathlib.Path:
  """The attention of a sentence that is neither short nor long."""
  examples = [*zip(of.pairs, of.translations, strict=True)][:_SHOWN]
  (source, _), translation = sorted(examples, key=lambda x: len(x[0][0]))[len(examples) // 2]
  return draw_attention(run, source, translation, workdir / "attention.png")


def draw_attention(run: Run, source: str, translation: str, path: str | pathlib.Path):
  """Draws where the model looked from each word of a translation; returns the path."""
  model = nnx.merge(run.graphdef, own_copies(run.params))
  return attention_heatmap(attention_panels(model, run.vocabulary, source, translation), path)
