r"""Times beam search with random parameters and words.

  python -m experiments.benchmark decode --config=configs/multi30k.py --beam_sizes=1,4 --length=16

The end mark's embedding is zero, so that no translation ends before its limit,
--config.decoding.extra_length tokens more than its source: the search at its longest. With the
extra `benchmark`, CTranslate2 translates with the same parameters, if it knows such positions
(--config.model.tables_per_head=False). They take turns in one process; their order changes from
round to round. With --out all times are written to OUT/decode/NAME-SENTENCESxLENGTH.json, and to
that block of OUT/decode.md.
"""

import functools
import importlib.util
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments import command
from experiments.benchmark import timing
from experiments.data.tokenizer import EOS, UNK, Tokenizers, train_tokenizer
from experiments.evaluation.tables import markdown_table
from experiments.export import ctranslate2_spec, foreign_value
from experiments.run import build
from experiments.training.task import Run
from experiments.translation.task import Translation, make_translator

FLAGS = dict(
  config=command.CONFIG,
  beam_sizes=command.Flag("1,4", "separated by commas; 1 is greedy"),
  length=command.Flag(32, "tokens of a source sentence, its end mark included"),
  sentences=command.Flag(64, "to translate in each round"),
  repetitions=command.Flag(8, "rounds"),
  out=timing.OUT,
)


def main(
  config: ConfigDict, beam_sizes: str, length: int, sentences: int, repetitions: int, out: str
) -> None:
  """Translates the same sentences with each beam size in turns."""
  timing.check_task(config, "translation")
  beams = timing.parse_lengths("beam_sizes", beam_sizes)
  folder = timing.make_folder(out, "decode")
  size = config.vocabulary.size
  words = [f"w{number}" for number in range(size - UNK - 1)]
  tokenizer = train_tokenizer([" ".join(words)], "words", size)
  training = build(Translation(config), Tokenizers(tokenizer, tokenizer))
  # With an embedding of zero the end mark's logit is never the highest.
  params = jax.tree.map(
    lambda x: x.at[EOS].set(0) if x.ndim == 2 and x.shape[0] == size else x, training.init().params
  )
  run = training.run._replace(params=params)
  chosen = np.random.default_rng(0).choice(words, (sentences, length - 1))
  lines = [" ".join(row) for row in chosen]
  functions = {}
  for beam in beams:
    functions[f"relpos_jax, {beam}"] = functools.partial(
      make_translator(run, beam_size=beam), lines
    )
    if translate := _ctranslate2(run, lines, beam):
      functions[f"CTranslate2, {beam}"] = translate
  results = dict(sentences=sentences, length=length)
  results["tokens"] = {  # also compiles
    name: sum(len(line.split()) for line in translate()) for name, translate in functions.items()
  }
  results["seconds"] = timing.time_rounds(functions, repetitions)
  timing.publish(config, results, folder, f"{sentences}x{length}", block)


def _ctranslate2(run: Run, lines: Sequence[str], beam_size: int) -> Callable | None:
  """Returns a function that translates with CTranslate2 and the run's parameters, if it can."""
  if not importlib.util.find_spec("ctranslate2") or foreign_value(run.config):
    return None
  import ctranslate2

  folder = tempfile.TemporaryDirectory()
  ctranslate2_spec(run).save(folder.name)
  cores = len(os.sched_getaffinity(0))
  translator = ctranslate2.Translator(folder.name, intra_threads=cores, inter_threads=1)
  sources = [[*line.split(), "</s>"] for line in lines]
  options = dict(beam_size=beam_size, length_penalty=run.config.decoding.length_penalty)
  options["max_decoding_length"] = len(sources[0]) + run.config.decoding.extra_length

  def translate() -> list[str]:
    found = translator.translate_batch(sources, **options)
    return [" ".join(result.hypotheses[0]) for result in found]

  return translate


def write_page(out: pathlib.Path) -> None:
  """Rewrites the blocks of out/decode.md from the raw results."""
  timing.rewrite_page(out / "decode", block)


def block(results: timing.Record) -> str:
  """Returns the provenance and the table of one measurement: medians and quartiles of rounds."""
  rows = []
  for name, seconds in results["seconds"].items():
    amounts = results["sentences"], results["tokens"][name]
    rates = (timing.quartiles(amount / np.array(seconds)) for amount in amounts)
    cells = [f"{median:,.1f} ({low:,.1f} to {high:,.1f})" for low, median, high in rates]
    rows.append([*name.rsplit(", ", 1), f"{results['tokens'][name]:,}", *cells])
  header = ["program", "beam size", "output tokens", "sentences a second", "output tokens a second"]
  rounds = len(next(iter(results["seconds"].values())))
  return (
    f"{timing.provenance(results)}\n"
    f"{results['name']}: {results['sentences']} sentences of {results['length']} tokens, "
    f"{rounds} rounds, config {results['digest']}.\n\n{markdown_table(header, rows)}"
  )
