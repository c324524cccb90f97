"""Scores a trained model again: BLEU of every test split, by sacreBLEU and as in the paper.

  python -m experiments.evaluate --workdir=runs/quickstart

Prints a table and sample translations, and draws the learning curves and an attention map. The
run's folder gets results.json, the pictures, each split's translations and, where its training is
finished, record.json: the run's line in a sweep's results.
"""

import json
import pathlib
import time
from collections.abc import Sequence

import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from configs import default
from experiments import command
from experiments.run import Run, encode_pairs, load_data, load_run, make_translator
from experiments.validation import changes, is_prepared
from relpos_jax.data.batching import pair_lengths
from relpos_jax.data.corpus import Corpus
from relpos_jax.evaluation.attention import attention_panels
from relpos_jax.evaluation.bleu import (
  corpus_bleu,
  join_subwords,
  paper_bleu,
  sentence_statistics,
)
from relpos_jax.evaluation.pictures import attention_heatmap, learning_curves
from relpos_jax.evaluation.record import make_record, to_line
from relpos_jax.evaluation.report import BleuRow, Sample, bleu_table, plain_text, samples
from relpos_jax.training.reporting import read_metrics
from relpos_jax.training.workdir import check_writable, read_json, write_whole

FLAGS = dict(workdir=command.Flag(None, "the folder of a training run"))
_NUM_SAMPLES = 5


def main(workdir: str) -> None:
  """Repeats the evaluation that ends a training."""
  folder = pathlib.Path(workdir)
  if folder.is_dir():
    check_writable(folder)
  run = load_run(folder)
  evaluate(run, load_data(run.config), folder)


def evaluate(run: Run, corpus: Corpus, workdir: pathlib.Path) -> None:
  """Translates the test splits; prints scores, sample translations and the pictures' paths."""
  translate = make_translator(run)
  rows, seconds, sentences = [], {}, {}
  for split in [name for name in ("test", "long") if name in corpus.splits]:
    sources, references = zip(*corpus.splits[split], strict=True)
    start = time.perf_counter()
    translations = translate(sources)
    seconds[split] = round(time.perf_counter() - start, 1)
    text = "".join(f"{line}\n" for line in joined(run.config, translations))
    workdir.joinpath(f"{split}.translations.txt").write_text(text, encoding="utf-8")
    rows.append(score(run.config, split, translations, references))
    sentences[split] = count_sentences(run, corpus.splits[split], translations)
    if split == "test":
      examples = [*zip(sources, references, translations, strict=True)][:_NUM_SAMPLES]
  pictures = [learning_curves(read_metrics(workdir), workdir / "learning_curves.png")]
  if not rows:
    print("no test pairs to score: give --config.data.pairs.test=source_file,target_file")
  else:
    _write_results(workdir, rows, seconds)
    shown = samples([Sample(*joined(run.config, triple)) for triple in examples])
    print("", plain_text(bleu_table(rows)), plain_text(shown), sep="\n\n", end="\n\n")
    source, _, translation = _of_middling_length(examples)
    pictures.append(draw_attention(run, source, translation, workdir / "attention.png"))
  print("pictures:", *pictures)
  if rows:
    _write_record(workdir, rows, sentences)


def joined(config: ConfigDict, lines: Sequence[str]) -> list[str]:
  """Lines for people to read: words, where the model has marked subwords."""
  return [join_subwords(line, config.evaluation.subword_mark) for line in lines]


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


def count_sentences(
  run: Run, pairs: Sequence[tuple[str, str]], translations: Sequence[str]
) -> list[list[int]]:
  """Each sentence's row in the record: its length in tokens, and what sacreBLEU counts in it."""
  lengths = pair_lengths(*encode_pairs(run.tokenizers, pairs)) - 1  # the end mark
  references = [reference for _, reference in pairs]
  counts = sentence_statistics(translations, references, **run.config.evaluation)
  return np.column_stack([lengths, counts]).tolist()


def draw_attention(run: Run, source: str, translation: str, path: str | pathlib.Path):
  """Draws where the model looked from each word of a translation; returns the path."""
  model = nnx.merge(run.graphdef, run.params)
  return attention_heatmap(attention_panels(model, run.tokenizers, source, translation), path)


def _write_results(workdir: pathlib.Path, rows: Sequence[BleuRow], seconds) -> None:
  results = {
    row.split: dict(
      sentences=row.num_sentences,
      seconds=seconds[row.split],
      sacrebleu=row.sacrebleu._asdict(),
      paper_bleu=row.paper._asdict(),
    )
    for row in rows
  }
  workdir.joinpath("results.json").write_text(
    json.dumps(results, indent=2) + "\n", encoding="utf-8"
  )


def _write_record(workdir: pathlib.Path, rows: Sequence[BleuRow], sentences) -> None:
  """Writes record.json, by which a sweep knows a finished run; not of one stopped on the way."""
  config = ConfigDict(read_json(workdir / "config.json"))
  metrics = read_metrics(workdir)
  if not metrics or metrics[-1]["step"] != config.training.num_steps:
    return
  scores = {
    row.split: dict(
      sacrebleu=row.sacrebleu.value,
      paper_bleu=row.paper.value,
      signatures=dict(sacrebleu=row.sacrebleu.signature, paper_bleu=row.paper.signature),
    )
    for row in rows
  }
  record = make_record(
    config.to_dict(),
    changes(config, default.get_config()),
    read_json(workdir / "environment.json"),
    metrics,
    scores,
    sentences,
  )
  write_whole(workdir / "record.json", to_line(record))


def _of_middling_length(examples):
  return sorted(examples, key=lambda example: len(example[0]))[len(examples) // 2]


if __name__ == "__main__":
  command.run(main, FLAGS)
