r"""Times beam search of a config's translation model with random parameters.

  python -m experiments.benchmark decode --config=configs/multi30k.py --beam_sizes=1,4 --length=16
  python -m experiments.benchmark decode --config=configs/wmt14.py --config.model.dtype=float32 \
      --sentences=16 --out=results

Every beam size translates the same random sentences, in turns, in one process; the order changes
from round to round. The end mark's embedding is zero, so that no translation ends before its limit,
--config.decoding.extra_length tokens more than its source: the search at its longest.

Prints a table. With --out it also writes every time to OUT/decode/NAME-SENTENCESxLENGTH.json and
that block of OUT/decode.md.
"""

import functools
import pathlib

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from experiments import command
from experiments.benchmark import timing
from experiments.benchmark.timing import parse_lengths
from experiments.config import own_values, validate
from experiments.run import init_params, plan_run
from relpos_jax.data.tokenizer import EOS, UNK, Tokenizers, train_tokenizer
from relpos_jax.errors import InputError
from relpos_jax.evaluation.records import digest
from relpos_jax.evaluation.tables import markdown_table, rewrite_blocks
from relpos_jax.training.workdir import environment
from relpos_jax.translation.task import Translation, make_translator

FLAGS = dict(
  config=command.CONFIG,
  beam_sizes=command.Flag("1,4", "separated by commas; 1 is greedy"),
  length=command.Flag(32, "tokens of a source sentence, its end mark included"),
  sentences=command.Flag(64, "to translate in each round"),
  repetitions=command.Flag(8, "rounds"),
  out=command.Flag("", "the folder to write to; empty: only print"),
)


def main(
  config: ConfigDict, beam_sizes: str, length: int, sentences: int, repetitions: int, out: str
) -> None:
  """Translates the sentences with each beam size in turns."""
  validate(config)
  if config.task != "translation":
    raise InputError(f"--config is of {config.task}: give one of translation")
  if min(length - 1, sentences, repetitions) < 1:
    raise InputError("give --length of at least 2, --sentences and --repetitions of at least 1")
  beams = parse_lengths("beam_sizes", beam_sizes)
  folder = command.make_folder(pathlib.Path(out, "decode"), "out") if out else None
  words = [f"w{number}" for number in range(config.vocabulary.size - UNK - 1)]
  tokenizer = train_tokenizer([" ".join(words)], "words", config.vocabulary.size)
  run = plan_run(Translation(config), Tokenizers(tokenizer, tokenizer))
  run = run._replace(params=without_ends(init_params(run), config.vocabulary.size))
  chosen = np.random.default_rng(0).choice(words, (sentences, length - 1))
  lines = [" ".join(row) for row in chosen]
  functions = {
    str(beam): functools.partial(make_translator(run, beam_size=beam), lines) for beam in beams
  }
  tokens = {  # also compiles
    beam: sum(len(line.split()) for line in function()) for beam, function in functions.items()
  }
  results = dict(
    environment=environment(),
    name=config.name,
    digest=digest(own_values(config)),
    sentences=sentences,
    length=length,
    tokens=tokens,
    seconds=timing.time_rounds(functions, repetitions),
  )
  print(block(results))
  if folder:
    timing.write_results(folder / f"{config.name}-{sentences}x{length}.json", results)
    write_page(folder.parent)


def without_ends(params: nnx.State, vocab_size: int) -> nnx.State:
  """Sets the rows of the end mark in all embeddings to zero, where no logit is the highest."""
  is_embedding = lambda x: x.ndim == 2 and x.shape[0] == vocab_size
  return jax.tree.map(lambda x: x.at[EOS].set(0) if is_embedding(x) else x, params)


def write_page(out: pathlib.Path) -> None:
  """Rewrites the block of each out/decode/*.json in out/decode.md."""
  if results := timing.read_results(out / "decode"):
    rewrite_blocks(out / "decode.md", {name: block(of) for name, of in results.items()})


def block(results: timing.Record) -> str:
  """Returns the provenance and the table of one measurement: medians and quartiles of rounds."""
  rows = []
  for beam, seconds in results["seconds"].items():
    amounts = results["sentences"], results["tokens"][beam]
    rates = (timing.quartiles(amount / np.array(seconds)) for amount in amounts)
    cells = [f"{median:,.1f} ({low:,.1f} to {high:,.1f})" for low, median, high in rates]
    rows.append([beam, f"{results['tokens'][beam]:,}", *cells])
  header = ["beam size", "output tokens", "sentences a second", "output tokens a second"]
  rounds = len(next(iter(results["seconds"].values())))
  return "\n".join(
    [
      timing.provenance(results),
      f"{results['name']}: {results['sentences']} sentences of {results['length']} tokens, "
      f"{rounds} rounds, config {results['digest']}.\n",
      markdown_table(header, rows),
    ]
  )
