r"""Times a model's training step or beam search, with random parameters and tokens.

  python -m experiments.benchmark step --config=configs/multi30k.py --length=16
  python -m experiments.benchmark step --config=configs/wmt14.py --length=32 --out=results \
      --config.batches.tokens=1024 --config.model.dtype=float32
  python -m experiments.benchmark positions --config=configs/positions.py:chorales --length=512
  python -m experiments.benchmark decode --config=configs/multi30k.py --beam_sizes=1,4 --length=16

The models take turns in one process; their order changes from round to round. With --out all times
are written to NAME-ROWSxLENGTH.json in OUT/steps, OUT/positions or OUT/decode, and to that block of
OUT/steps.md or OUT/decode.md or the block cost-NAME-ROWSxLENGTH of OUT/positions.md.

`step` compares relative positions with the same model with sinusoids, on the same batch. The latter
is measured twice: a ratio is to the mean of its two copies, and the ratio of the two is the noise.
`positions` compares all rows of configs/positions.py: a ratio is to the first copy.

In `decode` the end mark's embedding is zero, so that no translation ends before its limit,
--config.decoding.extra_length tokens more than its source: the search at its longest. With the
extra `benchmark`, CTranslate2 translates with the same parameters, if it knows such positions
(--config.model.tables_per_head=False), and so does a Marian of Hugging Face of the same size.
"""

import functools
import importlib.util
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from configs.positions import sweep
from experiments import command
from experiments.benchmark import timing
from experiments.data.tokenizer import BOS, EOS, PAD, UNK, Tokenizers, encode, train_tokenizer
from experiments.errors import InputError
from experiments.evaluation.records import digest
from experiments.evaluation.tables import markdown_table, rewrite_blocks
from experiments.export import ctranslate2_spec, foreign_value
from experiments.files import write_whole
from experiments.run import build, own_values, parse_config
from experiments.training.environment import environment
from experiments.training.sharding import make_mesh
from experiments.training.task import Run
from experiments.translation.task import Translation, make_translator

BASELINE, AGAIN = "sinusoidal", "sinusoidal (again)"
_ORDERS = 6  # of three models
_OUT = command.Flag("", "the folder to write to; empty: only print")
STEP_FLAGS = dict(
  config=command.CONFIG,
  length=command.Flag(32, "tokens of a sentence, on either side"),
  repetitions=command.Flag(42, "steps of each model; a multiple of 6, the number of orders"),
  out=_OUT,
)
POSITION_FLAGS = STEP_FLAGS | dict(repetitions=command.Flag(22, "steps of each of the 11 models"))
DECODE_FLAGS = dict(
  config=command.CONFIG,
  beam_sizes=command.Flag("1,4", "separated by commas; 1 is greedy"),
  length=command.Flag(32, "tokens of a source sentence, its end mark included"),
  sentences=command.Flag(64, "to translate in each round"),
  repetitions=command.Flag(8, "rounds"),
  out=_OUT,
)


def time_steps(config: ConfigDict, length: int, repetitions: int, out: str) -> None:
  """Times the training steps of three models in turns."""
  _check(config, "translation", "music")
  if config.model.positions == BASELINE:
    raise InputError(f"config.model.positions is {BASELINE}, the baseline: give relative")
  if repetitions < 1 or repetitions % _ORDERS:
    raise InputError(f"--repetitions={repetitions}: give a multiple of {_ORDERS}")
  positions = {BASELINE: BASELINE, AGAIN: BASELINE, config.model.positions: config.model.positions}
  models = {name: {"model.positions": kind} for name, kind in positions.items()}
  _time_models(config, models, length, repetitions, out, "steps")


def time_positions(config: ConfigDict, length: int, repetitions: int, out: str) -> None:
  """Times the training steps of a model with each scheme of positions in turns."""
  _check(config, "translation", "music")
  models = {row: {"model.positions": row} | changes for row, changes in sweep()}
  models[AGAIN] = models[BASELINE]
  _time_models(config, models, length, repetitions, out, "positions")


def _time_models(config, models, length: int, repetitions: int, out: str, command_name: str):
  """Times the training steps of a config's models, changes by name, and writes the page."""
  if not 1 <= length <= config.batches.tokens:
    raise InputError(f"--length={length}: give 1 to {config.batches.tokens}, config.batches.tokens")
  folder = command.make_folder(pathlib.Path(out, command_name), "out") if out else None
  shape = config.batches.tokens // length, length
  steps = {name: make_stepper(config, changes, shape) for name, changes in models.items()}
  results = {name: config.model[name] for name in ("positions", "width", "dtype")}
  results["models"] = {name: figures for name, (_, figures) in steps.items()}
  steps = {name: step for name, (step, _) in steps.items()}
  results |= dict(shape=shape, seconds=timing.time_rounds(steps, repetitions))
  _publish(config, results, PAGES[command_name][1], folder, f"{shape[0]}x{length}")


def make_stepper(
  config: ConfigDict, changes: Mapping[str, object], shape: tuple[int, int]
) -> tuple[Callable[[], jax.Array], dict[str, int]]:
  """Returns a function that makes one step of training on the same batch [rows, tokens].

  Also returns the number of parameters, and the temporary memory of the compiled step.
  """
  task = parse_config(config, given=changes)
  training = build(task, task.mock_vocabulary(), make_mesh(data=1))
  state = training.init()
  size = config.vocabulary.size if config.task == "translation" else task.codec.vocab_size
  batch, treedef = jax.tree.flatten(task.empty_batch(shape))
  tokens = np.random.default_rng(0).integers(UNK, size, (len(batch), *shape))
  batch = treedef.unflatten(tokens.astype(np.int32))
  train_step = training.step.lower(state, batch).compile()
  figures = dict(parameters=sum(x.size for x in jax.tree.leaves(state.params)))
  figures["temporary_bytes"] = train_step.memory_analysis().temp_size_in_bytes

  def step():
    nonlocal state
    state, metrics = train_step(state, batch)
    return state, metrics

  jax.block_until_ready(step())
  return step, figures


def time_decoding(
  config: ConfigDict, beam_sizes: str, length: int, sentences: int, repetitions: int, out: str
) -> None:
  """Translates the same sentences with each beam size in turns."""
  _check(config, "translation")
  beams = timing.parse_lengths("beam_sizes", beam_sizes)
  folder = command.make_folder(pathlib.Path(out, "decode"), "out") if out else None
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
    for name, make in PEERS.items():
      if translate := make(run, lines, beam):
        functions[f"{name}, {beam}"] = translate
  results = dict(sentences=sentences, length=length)
  results["tokens"] = {  # also compiles
    name: sum(len(line.split()) for line in translate()) for name, translate in functions.items()
  }
  results["seconds"] = timing.time_rounds(functions, repetitions)
  _publish(config, results, decode_block, folder, f"{sentences}x{length}")


def _ctranslate2(run: Run, lines: Sequence[str], beam_size: int) -> Callable | None:
  """Returns a function that translates with CTranslate2 and the run's parameters, if it can."""
  if not importlib.util.find_spec("ctranslate2") or foreign_value(run.config):
    return None
  import ctranslate2

  folder = tempfile.TemporaryDirectory()
  ctranslate2_spec(run).save(folder.name)
  translator = ctranslate2.Translator(folder.name, intra_threads=_num_cores(), inter_threads=1)
  sources = [[*line.split(), "</s>"] for line in lines]
  options = dict(beam_size=beam_size, length_penalty=run.config.decoding.length_penalty)
  options["max_decoding_length"] = len(sources[0]) + run.config.decoding.extra_length

  def translate() -> list[str]:
    found = translator.translate_batch(sources, **options)
    return [" ".join(result.hypotheses[0]) for result in found]

  return translate


def _transformers(run: Run, lines: Sequence[str], beam_size: int) -> Callable | None:
  """Returns a function that translates with Hugging Face's Marian, of the same size."""
  if not importlib.util.find_spec("transformers"):
    return None
  import torch
  import transformers

  torch.set_num_threads(_num_cores())
  model, size = run.config.model, run.config.vocabulary.size
  layers = dict(
    layers=model.num_layers, attention_heads=model.num_heads, ffn_dim=model.feed_forward
  )
  both = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in layers.items()}
  tokens = dict(pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=BOS)
  sizes = dict(vocab_size=size, d_model=model.width)
  config = transformers.MarianConfig(**sizes, **both, **tokens)
  marian = transformers.MarianMTModel(config).eval()
  encoded = encode(run.vocabulary.source, lines)
  shape = len(lines), int(encoded.lengths.max())
  sources = torch.tensor(encoded.padded(np.arange(len(lines)), shape, PAD), dtype=torch.long)
  length = sources.shape[1] + run.config.decoding.extra_length
  options = dict(num_beams=beam_size, min_new_tokens=length, max_new_tokens=length)

  @torch.inference_mode()
  def translate() -> list[str]:
    return [" ".join(["w"] * (len(row) - 1)) for row in marian.generate(sources, **options)]

  return translate


PEERS = dict(CTranslate2=_ctranslate2, transformers=_transformers)


def _num_cores() -> int:
  return len(os.sched_getaffinity(0))


def _check(config: ConfigDict, *tasks: str) -> None:
  parse_config(config)
  if config.task not in tasks:
    raise InputError(f"--config is of {config.task}: give one of {' or '.join(tasks)}")


def _publish(config: ConfigDict, results: dict, block: Callable, folder, shape: str) -> None:
  results |= dict(environment=environment(), name=config.name, digest=digest(own_values(config)))
  print(block(results))
  if folder:
    write_whole(folder / f"{config.name}-{shape}.json", json.dumps(results) + "\n")
    write_page(folder.parent)


# Pages --------------------------------------------------------------------------------------------


def write_page(out: pathlib.Path) -> None:
  """Rewrites the blocks of the pages from the raw results."""
  for name, (prefix, block) in PAGES.items():
    if results := timing.read_results(out / name):
      blocks = {prefix + stem: block(of) for stem, of in results.items()}
      rewrite_blocks(out / f"{name}.md", blocks)


def step_block(results: timing.Record) -> str:
  """Returns the provenance and the table of one measurement of steps."""
  seconds, positions = (results[x] for x in ("seconds", "positions"))
  baseline = np.mean([seconds[BASELINE], seconds[AGAIN]], axis=0)
  cells = [[BASELINE, *_speed(results, BASELINE), "", "", ""]]
  for name, against in ((AGAIN, seconds[BASELINE]), (positions, baseline)):
    ratios = np.divide(seconds[name], against)
    low, median, high = timing.quartiles(ratios)
    samples = np.random.default_rng(12345).choice(ratios, (10_000, len(ratios)))  # a bootstrap
    interval = "{:.3f} to {:.3f}".format(*np.quantile(np.median(samples, axis=1), (0.025, 0.975)))
    ratio = [f"{median:.3f}", interval, f"{low:.3f} to {high:.3f}"]
    cells.append([name, *_speed(results, name), *ratio])
  header = ["positions", *_SPEED, "ratio, median", "its 95% interval", "quartiles"]
  return _with_setting(results, markdown_table(header, cells))


def cost_block(results: timing.Record) -> str:
  """Returns the provenance and the table of one measurement of schemes of positions."""
  seconds, cells = results["seconds"], []
  for name, figures in results["models"].items():
    ratios = timing.quartiles(np.divide(seconds[name], seconds[BASELINE]))
    ratio = "" if name == BASELINE else "{1:.3f} ({0:.3f} to {2:.3f})".format(*ratios)
    memory = f"{figures['temporary_bytes'] / 2**20:,.1f} MiB"
    cells.append([name, f"{figures['parameters']:,}", *_speed(results, name), ratio, memory])
  header = ["positions", "parameters", *_SPEED]
  header += [f"ratio to {BASELINE} (quartiles)", "temporary memory"]
  return _with_setting(results, markdown_table(header, cells))


_SPEED = "ms a step, median", "tokens a second"


def _speed(results: timing.Record, name: str) -> tuple[str, str]:
  median = np.median(results["seconds"][name])
  return f"{1e3 * median:,.1f}", f"{np.prod(results['shape']) / median:,.0f}"


def _with_setting(results: timing.Record, table: str) -> str:
  rows, length = results["shape"]
  return (
    f"{timing.provenance(results, ['jax'])}\n"
    f"{results['name']}: width {results['width']}, {rows} x {length} tokens, {results['dtype']}, "
    f"{len(results['seconds'][BASELINE])} rounds, config {results['digest']}.\n\n{table}"
  )


def decode_block(results: timing.Record) -> str:
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


PAGES = dict(steps=("", step_block), positions=("cost-", cost_block), decode=("", decode_block))
