"""Trains an encoder on short inputs of a generated task, and scores longer ones.

`train` says what happens, in order. `experiments.train` calls it.
"""

import functools

import jax
import optax
from flax import nnx
from ml_collections import ConfigDict

from experiments.errors import InputError
from experiments.files import Path
from experiments.length_tasks import scores
from experiments.length_tasks.model import TaskModel, TaskModelConfig
from experiments.length_tasks.tasks import (
  NO_TARGET,
  TASKS,
  Task,
  TaskBatch,
  TaskBatches,
)
from experiments.length_tasks.tasks import empty_batch as empty_batch  # for commands
from experiments.training import loop, processes, results, start
from experiments.training.batches import longest_shape
from experiments.training.loss import Loss, cross_entropy
from experiments.training.model import model_values
from experiments.training.run import Run, load_average, load_trained
from experiments.training.sharding import AnyMesh, make_mesh
from experiments.training.step import Steps, make_steps


def train(config: ConfigDict, workdir: Path, flags: loop.Flags) -> None:
  """Trains from the last checkpoint in the run directory, if any, and evaluates.

  The caller has checked the config. Data are generated from seed and step. After a
  signal, saves the state and raises Stopped.
  """
  task = choose_task(config)
  mesh = make_mesh(**config.mesh)
  with jax.set_mesh(mesh):
    steps = build(config, task, mesh)
    run = Run(config, task, mesh, steps.graphdef, steps.shapes.params)
    batches, valid_batches = make_batches(config, task, mesh)
    start.print_sizes(run, batches, valid_batches)
    num_steps = start.count_steps(config.training, batches.num_per_epoch)
    start.check_inputs(workdir, {})

    with start.open_checkpoints(config.training, workdir) as checkpoints:
      state = start.restore(checkpoints, steps.shapes, workdir)
      start.write_start(run, state, workdir, num_steps, {})
      loop.train(
        run,
        steps,
        state,
        batches,
        valid_batches,
        num_steps=num_steps,
        score=scores.make_score(run, valid_batches),
        checkpoints=checkpoints,
        workdir=workdir,
        flags=flags,
      )

  score_run(load_average(run, workdir), workdir)
  processes.wait_for_all("evaluated")


def check(config: ConfigDict) -> None:
  """Raises InputError for wrong tests or options of positions.

  The tests must have longer inputs than training. The range of random positions must
  not be smaller than the number of tokens in the longest test. `table_stddev` needs
  Shaw's tables.
  """
  longest_input, longest_trained = config.evaluation.longest, config.batches.max_length
  if longest_input <= longest_trained:
    raise InputError(
      f"config.evaluation.longest is {longest_input}, but training has inputs of up to "
      f"config.batches.max_length {longest_trained}: give {longest_trained + 1} or more"
    )
  longest = choose_task(config).num_tokens(longest_input)
  drawn_from = config.model.random_positions
  if 0 < drawn_from < longest:
    raise InputError(
      f"config.model.random_positions is {drawn_from}, but the longest test has "
      f"{longest} tokens: give as many or more, or 0 for plain positions"
    )
  model = config.model
  has_tables = model.positions in ("relative", "both")
  has_both = has_tables and model.relative_keys and model.relative_values
  if model.table_stddev and not has_both:
    raise InputError(
      f"config.model.table_stddev is {model.table_stddev}, which needs Shaw's tables "
      f"of keys and values: give 0"
    )


def choose_task(config: ConfigDict) -> Task:
  """Returns the task of `config.data`, which takes the place of a vocabulary."""
  return TASKS[config.data.source]


mock_vocabulary = choose_task


def make_batches(
  config: ConfigDict, task: Task, mesh: AnyMesh
) -> tuple[TaskBatches, TaskBatches]:
  """Makes training batches of random lengths, and a validation batch of each length."""
  settings = config.batches
  padded_rows, _ = longest_shape(config, mesh.shape)
  make = functools.partial(
    TaskBatches,
    task,
    range(1, settings.max_length + 1),
    rows=settings.tokens // settings.max_length,
    padded_rows=padded_rows,
    num_shapes=settings.num_shapes,
    drawn_from=config.model.random_positions,
  )
  return make(seed=config.seed), make(seed=None)


def build(config: ConfigDict, task: Task, mesh: AnyMesh) -> Steps:
  """Builds model, optimizer and steps on a mesh, without computing or compiling."""
  schedule = optax.constant_schedule(config.training.learning_rate)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
  return make_steps(
    functools.partial(make_model, config, task),
    loss,
    optimizer,
    schedule,
    mesh,
    seed=config.seed,
    num_microbatches=config.training.num_microbatches,
    ring=config.mesh.ring,
  )


def make_model(config: ConfigDict, task: Task, rngs: nnx.Rngs) -> TaskModel:
  """Makes the model of `config.model`, with random parameters."""
  values = model_values(config.model, TaskModelConfig)
  num_symbols = task.num_symbols + 2  # and the blank and padding
  return TaskModel(TaskModelConfig(num_symbols, task.num_classes, **values), rngs=rngs)


def loss(
  model: TaskModel,
  batch: TaskBatch,
  rngs: nnx.Rngs | None = None,
) -> Loss:
  """Sums the cross-entropy of all output symbols."""
  return cross_entropy(model(batch, rngs), batch.targets, pad=NO_TARGET)


def load_run(config: ConfigDict, workdir: Path) -> Run:
  """Loads the trained model of a run directory; replicates it on all devices."""
  return load_trained(config, choose_task(config), build, workdir)


def evaluate(config: ConfigDict, workdir: Path) -> None:
  """Scores the trained model of a run directory."""
  score_run(load_run(config, workdir), workdir)


def score_run(run: Run, workdir: Path) -> None:
  """Scores short and long inputs; writes the scores and the run's record."""
  results.report(scores.evaluate(run), run, workdir, "accuracy")
