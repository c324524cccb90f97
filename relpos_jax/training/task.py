"""What a kind of system adds to training and evaluating; the commands know nothing else of it."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, get_args, get_origin

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from relpos_jax.errors import InputError
from relpos_jax.training.loss import Loss
from relpos_jax.training.sharding import AnyMesh
from relpos_jax.typing import PyTree


class Task(Protocol):
  """Data, model, loss and scores of a kind of system, as a config has them.

  Made of a config alone. A data set has `notes`, lines for the log. A vocabulary is what the model
  must know of the data before it is made: it is kept in the run's folder, so that a model can be
  used without its data.
  """

  config: ConfigDict
  score: str  # its first score; in metrics, if at all, `valid_` and this in lower case

  def check(self, sizes: Mapping[str, int]) -> None:
    """Holds this kind's own values against their meaning, for a mesh of these sizes.

    It takes a second and no data.

    Raises:
      InputError: names the first value that is wrong, and the remedy.
    """

  def load_data(self) -> Any:
    """The data of `config.data`; InputError for whatever is wrong with them."""

  def learn_vocabulary(self, data: Any, workdir: pathlib.Path) -> Any:
    """That of the run's folder, or else one learned from the training split."""

  def load_vocabulary(self, workdir: pathlib.Path) -> Any:
    """That of the run's folder; InputError if there is none."""

  def save_vocabulary(self, vocabulary: Any, workdir: pathlib.Path) -> None:
    """Writes it into the run's folder, if it is not there."""

  def mock_vocabulary(self) -> Any:
    """One of the size that the config wants, and no more: for the shapes of a model."""

  def make_model(self, vocabulary: Any, rngs: nnx.Rngs) -> nnx.Module:
    """The model of `config.model` with random parameters."""

  def make_batches(self, data: Any, vocabulary: Any, mesh: AnyMesh) -> tuple[Any, Any]:
    """Batches of the training split, endless and shuffled, and of the valid split, in order.

    As `relpos_jax.data.batching.Batches`: `batches[step]` is a tree of arrays, rows first, and
    `batches.examples` a tree of arrays that determines every batch.
    """

  def mock_batches(self, mesh: AnyMesh) -> Any:
    """Training batches of data that nobody wrote, of the shapes that the config's data may get."""

  def empty_batch(self, shape: tuple[int, ...]) -> Any:
    """A batch of one of the batches' `shapes`, all padding."""

  def loss(self, model: nnx.Module, batch: Any, rngs: nnx.Rngs | None = None) -> Loss:
    """What the model loses on a batch; `rngs` switches dropout on."""

  def make_report(
    self, run: "Run", data: Any, batches: Any
  ) -> Callable[[PyTree], tuple[dict[str, float], str]]:
    """What evaluates parameters during training, besides the loss: values by name, and a text.

    `batches`: those of the valid split.
    """

  def evaluate(self, run: "Run", data: Any, workdir: pathlib.Path) -> "Evaluation | None":
    """Scores the trained model. Every process takes part; the first writes and has the result."""


class Run(NamedTuple):
  """A model, trained or not, and what belongs to it."""

  task: Task
  vocabulary: Any
  mesh: jax.sharding.Mesh
  graphdef: nnx.GraphDef
  params: nnx.State  # arrays, or shapes while there are none

  @property
  def config(self) -> ConfigDict:
    """That of the task."""
    return self.task.config


class Evaluation(NamedTuple):
  """What a trained model is worth.

  Attributes:
    text: tables and samples, for people.
    results: by split, for results.json.
    scores, sentences: by split, for `relpos_jax.evaluation.records`.
    pictures: files drawn.
  """

  text: str
  results: Mapping[str, Any]
  scores: Mapping[str, Any]
  sentences: Mapping[str, list[list[int | float]]]
  pictures: tuple[pathlib.Path, ...] = ()


def check_model(kind: type[nnx.Module], make_config: Callable[[], Any], *inputs: PyTree) -> None:
  """Traces one layer of a model in training; nothing is computed.

  Args:
    kind: the class of the model.
    make_config: makes the model's own config.
    inputs: what the model is called with, as arrays or as shapes.

  Raises:
    InputError: the model does not support its config.
  """
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
  try:
    _trace(kind, dataclasses.replace(make_config(), num_layers=1), shapes)
  except (ValueError, NotImplementedError) as error:
    raise InputError(f"config.model: {' '.join(str(error).split())}") from error


@functools.cache  # many cells of a sweep have the same model
def _trace(kind: type[nnx.Module], config: Any, inputs: tuple[PyTree, ...]) -> None:
  def run(*inputs):
    return kind(config, rngs=nnx.Rngs(0))(*inputs, rngs=nnx.Rngs(dropout=0))

  jax.eval_shape(run, *inputs)


def own_copies(params: PyTree) -> PyTree:
  """Copies of whole arrays that are this process's alone: no other need join what is computed."""
  return jax.tree.map(jnp.asarray, jax.device_get(params))


def model_choices(kind: type) -> dict[str, tuple]:
  """The choices of `config.model`, by dotted key, that a model's own config names."""
  return {
    f"model.{field.name}": get_args(field.type)
    for field in dataclasses.fields(kind)
    if get_origin(field.type) is Literal
  }


def model_values(config: ConfigDict) -> dict[str, Any]:
  """The values of `config.model` as a model's own config has them."""
  return config.model.to_dict() | dict(implementation=config.model.implementation or None)
