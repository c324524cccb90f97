"""Times training steps of models with random parameters."""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
import scipy.stats
from ml_collections import ConfigDict

from configs.positions import sweep
from experiments import command
from experiments.benchmark import attention, timing
from experiments.config import own_values
from experiments.data.tokenizer import UNK
from experiments.errors import InputError
from experiments.evaluation.records import digest
from experiments.evaluation.tables import markdown_table
from experiments.files import write_whole
from experiments.systems import find_system, parse_config
from experiments.training.environment import environment
from experiments.training.sharding import make_mesh

BASELINE, AGAIN = "sinusoidal", "sinusoidal (again)"
_PREFIXES = dict(
  steps="", positions="cost-"
)  # of blocks, by the folder of the raw results


def time_steps(config: ConfigDict, length: int, repetitions: int, out: str) -> None:
  """Times the training steps of three models in turns."""
  relative = config.model.get("positions")  # which a config of graphs has not
  positions = {BASELINE: BASELINE, AGAIN: BASELINE, relative: relative}
  if len(positions) < 3:
    raise InputError(
      f"config.model.positions is {BASELINE}, the baseline: give relative"
    )
  models = {name: {"model.positions": kind} for name, kind in positions.items()}
  _time_models(config, models, length, repetitions, out, "steps")


def time_positions(config: ConfigDict, length: int, repetitions: int, out: str) -> None:
  """Times the training steps of a model with each scheme of positions in turns."""
  models = {row: {"model.positions": row} | changes for row, changes in sweep()}
  models[AGAIN] = models[BASELINE]
  _time_models(config, models, length, repetitions, out, "positions")


def _time_models(config, models, length: int, repetitions: int, out: str, kind: str):
  """Times the training steps of a config's models, changes by name, and writes the page."""
  parse_config(config)
  if config.task == "graphs":
    raise InputError("--config is of graphs: give one of translation or music")
  if not 1 <= length <= config.batches.tokens:
    raise InputError(
      f"--length={length}: give 1 to {config.batches.tokens}, config.batches.tokens"
    )
  folder = command.make_folder(pathlib.Path(out, kind), "out") if out else None
  shape = config.batches.tokens // length, length
  steps = {
    name: make_stepper(config, changes, shape) for name, changes in models.items()
  }
  results = {name: config.model[name] for name in ("positions", "width", "dtype")}
  results["models"] = {name: figures for name, (_, figures) in steps.items()}
  steps = {name: step for name, (step, _) in steps.items()}
  results |= dict(shape=shape, seconds=timing.time_rounds(steps, repetitions))
  results |= dict(
    environment=environment(), name=config.name, digest=digest(own_values(config))
  )
  print(block_of_steps(results))
  if folder:
    path = folder / f"{config.name}-{shape[0]}x{length}.json"
    write_whole(path, json.dumps(results) + "\n")
    timing.rewrite_page(folder, block_of_steps, _PREFIXES[kind])


def make_stepper(
  config: ConfigDict, changes: Mapping[str, object], shape: tuple[int, int]
) -> tuple[Callable[[], object], dict[str, int]]:
  """Returns a function that makes one step of training on the same batch [rows,
  tokens].

  Also returns the number of parameters, and the temporary memory of the compiled step.
  """
  config = parse_config(config, changes=changes)
  system = find_system(config.task)
  vocabulary = system.mock_vocabulary(config)
  steps = system.build(config, vocabulary, make_mesh(data=1))
  state = steps.init()
  is_music = config.task == "music"
  size = vocabulary.vocab_size if is_music else config.vocabulary.size
  batch, treedef = jax.tree.flatten(system.empty_batch(shape))
  tokens = np.random.default_rng(0).integers(UNK, size, (len(batch), *shape))
  batch = treedef.unflatten(tokens.astype(np.int32))
  train_step = steps.train.lower(state, batch).compile()
  figures = dict(parameters=sum(x.size for x in jax.tree.leaves(state.params)))
  figures["temporary_bytes"] = train_step.memory_analysis().temp_size_in_bytes

  def step():
    nonlocal state
    state, metrics = train_step(state, batch)
    return state, metrics

  jax.block_until_ready(step())
  return step, figures


def block_of_steps(results: timing.Record) -> str:
  """Returns the provenance and the table of steps: medians, and ratios to the baseline."""
  (rows, length), seconds, cells = results["shape"], results["seconds"], []
  baseline = np.mean([seconds[BASELINE], seconds[AGAIN]], axis=0)
  for name, figures in results["models"].items():
    median = np.median(seconds[name])
    against = seconds[BASELINE] if name == AGAIN else baseline
    memory = f"{figures['temporary_bytes'] / 2**20:,.1f} MiB"
    times = f"{1e3 * median:,.1f}", f"{rows * length / median:,.0f}"
    ratios = ("", "") if name == BASELINE else _ratio(seconds[name], against)
    cells.append([name, f"{figures['parameters']:,}", memory, *times, *ratios])
  header = [
    "positions",
    "parameters",
    "temporary memory",
    "ms a step, median",
    "tokens a second",
  ]
  header += ["ratio (quartiles)", "95% interval of the ratio"]
  return (
    f"{timing.provenance(results, ['jax'])}\n"
    f"{results['name']}: width {results['width']}, {rows} x {length} tokens, {results['dtype']}, "
    f"{len(baseline)} rounds, config {results['digest']}.\n\n{markdown_table(header, cells)}"
  )


def _ratio(
  seconds: Sequence[float], against: Sequence[float] | np.ndarray
) -> tuple[str, str]:
  """Returns the median ratio of a round with its quartiles, and the median's bootstrap interval."""
  ratios = np.divide(seconds, against)
  low, median, high = timing.quartiles(ratios)
  options = dict(
    n_resamples=10_000, method="percentile", rng=np.random.default_rng(12345)
  )
  interval = scipy.stats.bootstrap((ratios,), np.median, **options).confidence_interval
  return f"{median:.3f} ({low:.3f} to {high:.3f})", "{:.3f} to {:.3f}".format(*interval)


def write_pages(out: pathlib.Path) -> None:
  """Rewrites the page of each command, attention's too, that has raw results in a folder."""
  timing.rewrite_page(out / "attention", attention.draw_block)
  for name, prefix in _PREFIXES.items():
    timing.rewrite_page(out / name, block_of_steps, prefix)


MAINS = dict(step=time_steps, positions=time_positions, pages=write_pages)
