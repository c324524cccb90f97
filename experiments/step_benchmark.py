r"""Measures what relative positions cost in a training step, beside the sinusoidal twin.

  python -m experiments.step_benchmark --config=configs/multi30k.py --length=16
  python -m experiments.step_benchmark --config=configs/wmt14.py --length=32 \
      --config.batches.tokens=1024 --config.model.dtype=float32

Steps of both models on one random batch, in turn, in one process; each ratio is of two neighbours
in time. The sinusoidal model stands there twice: the ratio of its two copies is the noise.
"""

from collections.abc import Callable

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from experiments import command
from experiments.tasks.translation import Translation
from experiments.validation import validate
from relpos_jax.data.batching import Batch
from relpos_jax.data.tokenizer import UNK
from relpos_jax.errors import InputError
from relpos_jax.evaluation.cost import compare, ratio_quartiles
from relpos_jax.training.optimizer import adam, inverse_sqrt
from relpos_jax.training.step import init_state, make_train_step
from relpos_jax.training.workdir import environment

FLAGS = dict(
  config=command.CONFIG,
  length=command.Flag(32, "tokens a sentence, on either side"),
  repetitions=command.Flag(40, "steps of each model"),
)
_TWIN = "sinusoidal"


def main(config: ConfigDict, length: int, repetitions: int) -> None:
  """Prints a Markdown table: milliseconds a step, and the ratio's median and quartiles."""
  validate(config)
  if config.task != "translation":
    raise InputError(f"--config is of {config.task}: give one of translation")
  if not 1 <= length <= config.batches.tokens:
    raise InputError(f"--length={length}: give 1 to {config.batches.tokens}, config.batches.tokens")
  if repetitions < 1:
    raise InputError(f"--repetitions={repetitions}: give at least 1")
  again, positions = f"{_TWIN} (again)", config.model.positions
  kinds = {_TWIN: _TWIN, again: _TWIN} | {positions: positions}
  steps = {name: make_stepper(config, kind, length) for name, kind in kinds.items()}
  pairs = dict.fromkeys([(again, _TWIN), (positions, _TWIN)])
  times = compare(steps, pairs, repetitions)
  where, rows = environment(), config.batches.tokens // length
  print(
    f"{config.name}: width {config.model.width}, {rows} x {length} tokens, {config.model.dtype}"
  )
  print(f"{where['devices']}, {where['cpu_cores']} cores of {where['cpu']}, {where['date']}\n")
  print("| positions | ms a step | ratio to sinusoidal | quartiles |\n|---|---|---|---|")
  for (name, _), (seconds, against) in times.items():
    low, median, high = ratio_quartiles(seconds, against)
    print(f"| {name} | {1e3 * np.median(seconds):.1f} | {median:.3f} | {low:.3f} to {high:.3f} |")


def make_stepper(config: ConfigDict, positions: str, length: int) -> Callable[[], None]:
  """A function that makes one step of training, compiled, and waits for it."""
  config = config.copy_and_resolve_references()
  config.model.positions = positions
  task = Translation(config)
  model = task.make_model(task.mock_vocabulary(), nnx.Rngs(config.seed))
  graphdef, params = nnx.split(model, nnx.Param)
  optimizer = adam(inverse_sqrt(1e-4, 1000))
  train_step = make_train_step(
    graphdef,
    task.loss,
    optimizer,
    dropout_key=jax.random.key(config.seed, impl=config.training.prng),
  )
  shape = (2, config.batches.tokens // length, length)
  tokens = np.random.default_rng(0).integers(UNK, config.vocabulary.size, shape)
  batch = Batch(*tokens.astype(np.int32))
  state = init_state(params, optimizer)

  def step() -> None:
    nonlocal state
    state, metrics = train_step(state, batch)
    jax.block_until_ready(metrics)

  step()
  return step


if __name__ == "__main__":
  command.run(main, FLAGS)
