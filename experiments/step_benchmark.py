r"""Measures what relative positions cost in a training step, beside the sinusoidal twin.

  python -m experiments.step_benchmark --config=configs/multi30k.py --length=16
  python -m experiments.step_benchmark --config=configs/wmt14.py --length=32 --out=results \
      --config.batches.tokens=1024 --config.model.dtype=float32

Rounds of a step of each model on one random batch, in one process; the order changes from round to
round, so that each is as often first. The sinusoidal model stands there twice: a round's ratio is
to the mean of its two copies, and the ratio of one to the other is the noise.

With --out it keeps every single time in OUT/steps/NAME-ROWSxLENGTH.json, NAME being the config's,
and writes OUT/steps.md from all that are there.
"""

import json
import pathlib
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from experiments import command
from experiments.reports import steps as report
from experiments.sweep_cells import slug
from experiments.tasks.translation import Translation
from experiments.validation import validate
from experiments.values import own_values
from relpos_jax.data.batching import Batch
from relpos_jax.data.tokenizer import UNK
from relpos_jax.errors import InputError
from relpos_jax.evaluation.cost import take_turns
from relpos_jax.evaluation.record import digest
from relpos_jax.training.optimizer import adam, inverse_sqrt
from relpos_jax.training.step import init_state, make_train_step
from relpos_jax.training.workdir import environment, write_whole

FLAGS = dict(
  config=command.CONFIG,
  length=command.Flag(32, "tokens a sentence, on either side"),
  repetitions=command.Flag(42, "steps of each model; a multiple of 6, the orders there are"),
  out=command.Flag("", "the folder to write to; empty: only print"),
)
_ORDERS = 6  # of three models; of fewer rounds no median has an interval of 95%


def main(config: ConfigDict, length: int, repetitions: int, out: str) -> None:
  """Prints a Markdown section, its table and what that shows; keeps it if there is a folder."""
  _check(config, length, repetitions)
  name = _name(config, length)
  file = command.make_folder(pathlib.Path(out, "steps"), "out") / name if out else None
  kinds = {report.TWIN: report.TWIN, report.AGAIN: report.TWIN}
  kinds[config.model.positions] = config.model.positions
  steps = {name: make_stepper(config, kind, length) for name, kind in kinds.items()}
  results = _about(config, length) | dict(seconds=take_turns(steps, repetitions))
  print("\n".join(report.section(results)))
  if file:
    write_whole(file, json.dumps(results) + "\n")
    print(report.write(pathlib.Path(out)))


def _check(config: ConfigDict, length: int, repetitions: int) -> None:
  validate(config)
  if config.task != "translation":
    raise InputError(f"--config is of {config.task}: give one of translation")
  if config.model.positions == report.TWIN:
    raise InputError(f"config.model.positions is {report.TWIN}, the twin's: give relative")
  if not 1 <= length <= config.batches.tokens:
    raise InputError(f"--length={length}: give 1 to {config.batches.tokens}, config.batches.tokens")
  if repetitions < _ORDERS or repetitions % _ORDERS:
    raise InputError(f"--repetitions={repetitions}: give a multiple of {_ORDERS}")


def _name(config: ConfigDict, length: int) -> str:
  """Of its file."""
  if not (name := slug(config.name)):
    raise InputError(
      f"config.name is {config.name!r}: give a --config.name with a letter or digit in it"
    )
  return f"{name}-{config.batches.tokens // length}x{length}.json"


def _about(config: ConfigDict, length: int) -> dict:
  """What was measured, and where."""
  return dict(
    environment=environment(),
    name=config.name,
    digest=digest(own_values(config)),
    positions=config.model.positions,
    width=config.model.width,
    shape=(config.batches.tokens // length, length),
    dtype=config.model.dtype,
  )


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
