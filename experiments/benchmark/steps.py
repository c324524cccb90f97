r"""Times training steps of models with random parameters on random tokens.

  python -m experiments.benchmark step --config=configs/multi30k.py --length=16
  python -m experiments.benchmark step --config=configs/wmt14.py --length=32 --out=results \
      --config.batches.tokens=1024 --config.model.dtype=float32
  python -m experiments.benchmark positions --config=configs/positions.py:chorales --length=512

The models take turns in one process; their order changes from round to round. With --out all times
are written to OUT/steps/NAME-ROWSxLENGTH.json and that block of OUT/steps.md, or to
OUT/positions/NAME-ROWSxLENGTH.json and the block cost-NAME-ROWSxLENGTH of OUT/positions.md.

`step` compares relative positions with the same model with sinusoids, on the same batch. The latter
is measured twice: a ratio is to the mean of its two copies, and the ratio of the two is the noise.
`positions` compares all rows of configs/positions.py: a ratio is to the first copy.
"""

import pathlib
from collections.abc import Callable, Mapping

import jax
import numpy as np
import scipy.stats
from ml_collections import ConfigDict

from configs.positions import sweep
from experiments import command
from experiments.benchmark import timing
from experiments.data.tokenizer import UNK
from experiments.errors import InputError
from experiments.evaluation.tables import markdown_table
from experiments.run import build, parse_config
from experiments.training.sharding import make_mesh

BASELINE, AGAIN = "sinusoidal", "sinusoidal (again)"
_ORDERS = 6  # of three models
STEP_FLAGS = dict(
  config=command.CONFIG,
  length=command.Flag(32, "tokens of a sentence, on either side"),
  repetitions=command.Flag(42, "steps of each model; a multiple of 6, the number of orders"),
  out=timing.OUT,
)
POSITION_FLAGS = STEP_FLAGS | dict(repetitions=command.Flag(22, "steps of each of the 11 models"))


def time_steps(config: ConfigDict, length: int, repetitions: int, out: str) -> None:
  """Times the training steps of three models in turns."""
  timing.check_task(config, "translation", "music")
  if config.model.positions == BASELINE:
    raise InputError(f"config.model.positions is {BASELINE}, the baseline: give relative")
  if repetitions < 1 or repetitions % _ORDERS:
    raise InputError(f"--repetitions={repetitions}: give a multiple of {_ORDERS}")
  positions = {BASELINE: BASELINE, AGAIN: BASELINE, config.model.positions: config.model.positions}
  models = {name: {"model.positions": kind} for name, kind in positions.items()}
  _time_models(config, models, length, repetitions, out, "steps")


def time_positions(config: ConfigDict, length: int, repetitions: int, out: str) -> None:
  """Times the training steps of a model with each scheme of positions in turns."""
  timing.check_task(config, "translation", "music")
  models = {row: {"model.positions": row} | changes for row, changes in sweep()}
  models[AGAIN] = models[BASELINE]
  _time_models(config, models, length, repetitions, out, "positions")


def _time_models(config, models, length: int, repetitions: int, out: str, command_name: str):
  """Times the training steps of a config's models, changes by name, and writes the page."""
  if not 1 <= length <= config.batches.tokens:
    raise InputError(f"--length={length}: give 1 to {config.batches.tokens}, config.batches.tokens")
  folder = timing.make_folder(out, command_name)
  shape = config.batches.tokens // length, length
  steps = {name: make_stepper(config, changes, shape) for name, changes in models.items()}
  results = {name: config.model[name] for name in ("positions", "width", "dtype")}
  results["models"] = {name: figures for name, (_, figures) in steps.items()}
  steps = {name: step for name, (step, _) in steps.items()}
  results |= dict(shape=shape, seconds=timing.time_rounds(steps, repetitions))
  prefix, block = _BLOCKS[command_name]
  timing.publish(config, results, folder, f"{shape[0]}x{length}", block, prefix)


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


# Pages --------------------------------------------------------------------------------------------


def write_page(out: pathlib.Path) -> None:
  """Rewrites the blocks of both commands from the raw results."""
  for name, (prefix, block) in _BLOCKS.items():
    timing.rewrite_page(out / name, block, prefix)


def step_block(results: timing.Record) -> str:
  """Returns the provenance and the table of one measurement of steps."""
  seconds, positions = (results[x] for x in ("seconds", "positions"))
  baseline = np.mean([seconds[BASELINE], seconds[AGAIN]], axis=0)
  cells = [[BASELINE, *_speed(results, BASELINE), "", "", ""]]
  for name, against in ((AGAIN, seconds[BASELINE]), (positions, baseline)):
    ratios = np.divide(seconds[name], against)
    low, median, high = timing.quartiles(ratios)
    options = dict(n_resamples=10_000, method="percentile", rng=np.random.default_rng(12345))
    interval = scipy.stats.bootstrap((ratios,), np.median, **options).confidence_interval
    ratio = [f"{median:.3f}", "{:.3f} to {:.3f}".format(*interval), f"{low:.3f} to {high:.3f}"]
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


# By the folder of the raw results: the prefix of the blocks' names, and what writes them.
_BLOCKS = dict(steps=("", step_block), positions=("cost-", cost_block))
