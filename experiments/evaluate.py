"""Scores a trained model again: BLEU of every test split, by sacreBLEU and as in the paper.

  python -m experiments.evaluate --workdir=runs/quickstart

Prints a table and sample translations, and draws the learning curves and an attention map. The
run's folder gets results.json, the pictures, and each split's translations.
"""

import json
import pathlib
import time
from collections.abc import Sequence

from flax import nnx
from ml_collections import ConfigDict

from experiments import command
from experiments.run import Run, load_data, load_run, make_translator
from relpos_jax.data.corpus import Corpus
from relpos_jax.evaluation.attention import attention_panels
from relpos_jax.evaluation.bleu import corpus_bleu, paper_bleu
from relpos_jax.evaluation.pictures import attention_heatmap, learning_curves
from relpos_jax.evaluation.report import BleuRow, bleu_table, plain_text, samples
from relpos_jax.training.reporting import read_metrics
from relpos_jax.training.workdir import check_writable

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
  rows, seconds = [], {}
  for split in [name for name in ("test", "long") if name in corpus.splits]:
    sources, references = zip(*corpus.splits[split], strict=True)
    start = time.perf_counter()
    translations = translate(sources)
    seconds[split] = round(time.perf_counter() - start, 1)
    text = "".join(f"{line}\n" for line in translations)
    workdir.joinpath(f"{split}.translations.txt").write_text(text, encoding="utf-8")
    rows.append(score(run.config, split, translations, references))
    if split == "test":
      examples = [*zip(sources, references, translations, strict=True)][:_NUM_SAMPLES]
  pictures = [learning_curves(read_metrics(workdir), workdir / "learning_curves.png")]
  if not rows:
    print("no test pairs to score: give --config.data.pairs.test=source_file,target_file")
  else:
    _write_results(workdir, rows, seconds)
    print("", plain_text(bleu_table(rows)), plain_text(samples(examples)), sep="\n\n", end="\n\n")
    source, _, translation = _of_middling_length(examples)
    pictures.append(draw_attention(run, source, translation, workdir / "attention.png"))
  print("pictures:", *pictures)


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
      tokenized=config.data.moses,
    ),
  )


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


def _of_middling_length(examples):
  return sorted(examples, key=lambda example: len(example[0]))[len(examples) // 2]


if __name__ == "__main__":
  command.run(main, FLAGS)
