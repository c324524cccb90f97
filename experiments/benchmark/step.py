r"""Times a training step with relative positions against the same model with sinusoids.

  python -m experiments.benchmark step --config=configs/multi30k.py --length=16
  python -m experiments.benchmark step --config=configs/wmt14.py --length=32 --out=results \
      --config.batches.tokens=1024 --config.model.dtype=float32

Each round makes one step of each model on the same random batch, in one process; the order changes
from round to round. The sinusoidal model is measured twice: a round's ratio is to the mean of its
two copies, and the ratio of the two is the noise.

Prints a table. With --out it also writes every time to OUT/steps/NAME-ROWSxLENGTH.json, NAME being
the config's, and that block of OUT/steps.md.
"""

import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from experiments import command
from experiments.benchmark import timing
from experiments.config import own_values, validate
from experiments.run import make_optimizer, make_step
from relpos_jax.data.batching import Batch
from relpos_jax.data.tokenizer import UNK
from relpos_jax.errors import InputError
from relpos_jax.evaluation.records import digest
from relpos_jax.evaluation.tables import markdown_table, rewrite_blocks
from relpos_jax.training.step import init_state
from relpos_jax.training.workdir import environment
from relpos_jax.translation.task import Translation

BASELINE, AGAIN = "sinusoidal", "sinusoidal (again)"
_ORDERS = 6  # of three models
FLAGS = dict(
  config=command.CONFIG,
  length=command.Flag(32, "tokens of a sentence, on either side"),
  repetitions=command.Flag(42, "steps of each model; a multiple of 6, the number of orders"),
  out=command.Flag("", "the folder to write to; empty: only print"),
)


def main(config: ConfigDict, length: int, repetitions: int, out: str) -> None:
  """Times the steps of three models in turns."""
  validate(config)
  if config.task != "translation":
    raise InputError(f"--config is of {config.task}: give one of translation")
  if config.model.positions == BASELINE:
    raise InputError(f"config.model.positions is {BASELINE}, the baseline: give relative")
  if not 1 <= length <= config.batches.tokens:
    raise InputError(f"--length={length}: give 1 to {config.batches.tokens}, config.batches.tokens")
  if repetitions < 1 or repetitions % _ORDERS:
    raise InputError(f"--repetitions={repetitions}: give a multiple of {_ORDERS}")
  folder = command.make_folder(pathlib.Path(out, "steps"), "out") if out else None
  shape = config.batches.tokens // length, length
  positions = {BASELINE: BASELINE, AGAIN: BASELINE, config.model.positions: config.model.positions}
  steps = {name: make_stepper(config, kind, shape) for name, kind in positions.items()}
  results = dict(
    environment=environment(),
    name=config.name,
    digest=digest(own_values(config)),
    positions=config.model.positions,
    width=config.model.width,
    shape=shape,
    dtype=config.model.dtype,
    seconds=timing.time_rounds(steps, repetitions),
  )
  print(block(results))
  if folder:
    timing.write_results(folder / f"{config.name}-{shape[0]}x{length}.json", results)
    write_page(folder.parent)


def make_stepper(
  config: ConfigDict, positions: str, shape: tuple[int, int]
) -> Callable[[], jax.Array]:
  """Returns a function that makes one step of training on the same batch [rows, tokens]."""
  config = config.copy_and_resolve_references()
  config.model.positions = positions
  task = Translation(config)
  model = task.make_model(task.mock_vocabulary(), nnx.Rngs(config.seed))
  graphdef, params = nnx.split(model, nnx.Param)
  train_step, state = make_step(task, graphdef), init_state(params, make_optimizer(config))
  tokens = np.random.default_rng(0).integers(UNK, config.vocabulary.size, (2, *shape))
  batch = Batch(*tokens.astype(np.int32))

  def step():
    nonlocal state
    state, metrics = train_step(state, batch)
    return state, metrics

  jax.block_until_ready(step())  # compiles
  return step


def write_page(out: pathlib.Path) -> None:
  """Rewrites the block of each out/steps/*.json in out/steps.md."""
  if results := timing.read_results(out / "steps"):
    rewrite_blocks(out / "steps.md", {name: block(of) for name, of in results.items()})


def block(results: timing.Record) -> str:
  """Returns the provenance and the table of one measurement."""
  seconds, positions, (rows, length) = (results[x] for x in ("seconds", "positions", "shape"))
  baseline = np.mean([seconds[BASELINE], seconds[AGAIN]], axis=0)
  cells = [
    [BASELINE, f"{1e3 * np.median(seconds[BASELINE]):.1f}", "", "", ""],
    _row(AGAIN, seconds[AGAIN], seconds[BASELINE]),
    _row(positions, seconds[positions], baseline),
  ]
  header = ["positions", "ms a step, median", "ratio, median", "its 95% interval", "quartiles"]
  return "\n".join(
    [
      timing.provenance(results, ["jax"]),
      f"{results['name']}: width {results['width']}, {rows} x {length} tokens, "
      f"{results['dtype']}, {len(baseline)} rounds, config {results['digest']}.\n",
      markdown_table(header, cells),
    ]
  )


def _row(name: str, seconds: Sequence[float], against: Sequence[float]) -> list[str]:
  ratios = np.divide(seconds, against)
  low, median, high = timing.quartiles(ratios)
  interval = "{:.3f} to {:.3f}".format(*median_interval(ratios))
  ratio = [f"{median:.3f}", interval, f"{low:.3f} to {high:.3f}"]
  return [name, f"{1e3 * np.median(seconds):.1f}", *ratio]


def median_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
  """Returns the 95% interval of the median, by the percentile bootstrap.

  >>> median_interval([2.0] * 6)
  (2.0, 2.0)
  """
  samples = np.random.default_rng(12345).choice(values, (10_000, len(values)))
  low, high = np.quantile(np.median(samples, axis=1), (0.025, 0.975))
  return float(low), float(high)
