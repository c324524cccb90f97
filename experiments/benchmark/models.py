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
from experiments.systems import check_is_of_tokens, find_system, parse_config
from experiments.training.environment import environment
from experiments.training.sharding import make_mesh

BASELINE, AGAIN = "sinusoidal", "sinusoidal (again)"
# Starts of the names of sections, by the folder of the results.
_PREFIXES = dict(steps="", positions="cost-")
_COLUMNS = (
  "positions",
  "parameters",
  "temporary memory",
  "ms a step, median",
  "tokens a second",
  "ratio (quartiles)",
  "95% interval of the ratio",
)


def time_steps(config: ConfigDict, length: int, repetitions: int, out: str) -> None:
  """Times training steps with relative positions and twice with sinusoids."""
  relative = config.model.get("positions")  # configs of graphs have none
  if relative == BASELINE:
    problem = f"config.model.positions is {BASELINE}, the baseline"
    raise InputError(f"{problem}: give relative")
  models = {name: {"model.positions": BASELINE} for name in (BASELINE, AGAIN)}
  models[relative] = {"model.positions": relative}
  _time_models(config, models, length, repetitions, out, "steps")


def time_positions(config: ConfigDict, length: int, repetitions: int, out: str) -> None:
  """Times training steps with each position scheme."""
  models = {name: {"model.positions": name} | changes for name, changes in sweep()}
  models[AGAIN] = models[BASELINE]
  _time_models(config, models, length, repetitions, out, "positions")


def _time_models(config, models, length: int, repetitions: int, out: str, kind: str):
  """Times training steps of several models in turns; prints and writes the results.

  `models` has the changes of the config for each model, by name. Without `out`, nothing
  is written.
  """
  parse_config(config)
  check_is_of_tokens(config)
  tokens = config.batches.tokens
  if not 1 <= length <= tokens:
    raise InputError(f"--length={length}: give 1 to {tokens}, config.batches.tokens")
  folder = command.make_folder(pathlib.Path(out, kind), "out") if out else None
  shape = tokens // length, length
  steps, figures = {}, {}
  for name, changes in models.items():
    steps[name], figures[name] = make_stepper(config, changes, shape)
  results = dict(
    positions=config.model.positions,
    width=config.model.width,
    dtype=config.model.dtype,
    models=figures,
    shape=shape,
    seconds=timing.time_rounds(steps, repetitions),
    environment=environment(),
    name=config.name,
    digest=digest(own_values(config)),
  )
  print(make_section(results))
  if folder:
    path = folder / f"{config.name}-{shape[0]}x{length}.json"
    write_whole(path, json.dumps(results) + "\n")
    timing.rewrite_page(folder, make_section, _PREFIXES[kind])


def make_stepper(
  config: ConfigDict, changes: Mapping[str, object], shape: tuple[int, int]
) -> tuple[Callable[[], object], dict[str, int]]:
  """Makes a function that takes one training step, always on the same random batch.

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
  parameters = sum(x.size for x in jax.tree.leaves(state.params))
  temporary_bytes = train_step.memory_analysis().temp_size_in_bytes

  def step():
    nonlocal state
    state, metrics = train_step(state, batch)
    return state, metrics

  jax.block_until_ready(step())
  return step, dict(parameters=parameters, temporary_bytes=temporary_bytes)


def make_section(results: timing.Record) -> str:
  """Formats a section: the provenance, median times, and ratios to the baseline."""
  (num_rows, length), seconds = results["shape"], results["seconds"]
  baseline = np.mean([seconds[BASELINE], seconds[AGAIN]], axis=0)
  rows = []
  for name, figures in results["models"].items():
    ratio = interval = ""
    if name != BASELINE:
      against = seconds[BASELINE] if name == AGAIN else baseline
      ratio, interval = _format_ratio(seconds[name], against)
    memory = figures["temporary_bytes"] / 2**20
    median = np.median(seconds[name])
    cells = [
      name,
      f"{figures['parameters']:,}",
      f"{memory:,.1f} MiB",
      f"{1e3 * median:,.1f}",
      f"{num_rows * length / median:,.0f}",
      ratio,
      interval,
    ]
    rows.append(cells)
  described = (
    f"{results['name']}: width {results['width']}, {num_rows} x {length} tokens, "
    f"{results['dtype']}, {len(baseline)} rounds, config {results['digest']}."
  )
  table = markdown_table(_COLUMNS, rows)
  return f"{timing.provenance(results, ['jax'])}\n{described}\n\n{table}"


def _format_ratio(
  seconds: Sequence[float], against: Sequence[float] | np.ndarray
) -> tuple[str, str]:
  """Formats the median ratio with its quartiles, and its bootstrap interval."""
  ratios = np.divide(seconds, against)
  low, median, high = timing.quartiles(ratios)
  rng = np.random.default_rng(12345)
  bootstrap = scipy.stats.bootstrap(
    (ratios,), np.median, n_resamples=10_000, method="percentile", rng=rng
  )
  interval = bootstrap.confidence_interval
  ratio = f"{median:.3f} ({low:.3f} to {high:.3f})"
  return ratio, f"{interval.low:.3f} to {interval.high:.3f}"


def write_pages(out: pathlib.Path) -> None:
  """Writes the pages of all benchmarks again, from the results in the folder `out`.

  For example, out/steps.md shows the results in the folder out/steps.
  """
  timing.rewrite_page(out / "attention", attention.draw_section)
  for name, prefix in _PREFIXES.items():
    timing.rewrite_page(out / name, make_section, prefix)
