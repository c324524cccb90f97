"""The interface of a task: its data, model, loss and scores; and what several tasks share."""

import dataclasses
import functools
import importlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from experiments.config import LARGEST, between, rates
from experiments.data.batching import Batches, bucket_boundaries, round_up
from experiments.errors import InputError
from experiments.files import Path
from experiments.training.sharding import AnyMesh, multiples
from relpos_jax.nn import Positions
from relpos_jax.nn.schemes import PositionsName
from relpos_jax.typing import Array, Float, Int, PyTree


class Loss(NamedTuple):
  """Sums over target tokens other than padding; their quotient is the loss per token."""

  sum: Float[Array, ""]
  num_tokens: Int[Array, ""]


class Task(Protocol):
  """Data, model, loss and scores of a config.

  A data set has `splits` by name, train and valid among them, and `notes`, lines for
  the log. The model's shapes and outputs depend on the config and the vocabulary, which
  is kept in the run directory: a trained model works without its data.
  """

  config: ConfigDict
  score: (
    str  # the first score; its metric, if any, is named `valid_` and this in lower case
  )

  def __init__(self, config: ConfigDict):
    self.config = config

  def check(self, sizes: Mapping[str, int]) -> None:
    """Raises InputError if a value is wrong for a mesh of these sizes; reads no data."""

  def check_model(self) -> None:
    """Raises InputError if the model does not support its config.

    Traces the loss of one layer in training; nothing is computed.
    """
    config = self.config.copy_and_resolve_references()
    config.model.num_layers = 1
    config.update(name="", seed=0)  # many cells of a sweep have the same model
    try:
      _trace(type(self), config.to_json(sort_keys=True))
    except InputError:
      raise
    except (ValueError, NotImplementedError) as error:
      raise InputError(f"config.model: {' '.join(str(error).split())}") from error

  def load_data(self) -> Any:
    """Loads the data of `config.data`; raises InputError if they are invalid."""

  def name_split(self, split: str) -> str:
    """Returns the name of a split other than train in digests.json; its content may not change."""
    return f"{dict(valid='validation').get(split, split)} data"

  def learn_vocabulary(self, data: Any, workdir: Path) -> Any:
    """Loads the vocabulary in the run directory, or learns one from the training split."""
    return self.load_vocabulary(workdir)

  def load_vocabulary(self, workdir: Path) -> Any:
    """Loads the vocabulary in the run directory; raises InputError if there is none."""

  def save_vocabulary(self, vocabulary: Any, workdir: Path) -> None:
    """Writes the vocabulary into the run directory, if it is not there and not in the config."""

  def mock_vocabulary(self) -> Any:
    """Returns a vocabulary of the configured size, for the shapes of a model."""

  def make_model(self, vocabulary: Any, rngs: nnx.Rngs) -> nnx.Module:
    """Returns the model of `config.model` with random parameters."""

  def make_batches(self, data: Any, vocabulary: Any, mesh: AnyMesh) -> tuple[Any, Any]:
    """Returns batches of the training split, endless and shuffled, and of the valid
    split.

    As in `experiments.data.batching.Batches`, `batches[step]` is a tree of arrays, rows
    first. `batches.examples` is a tree of arrays that determines every batch.
    """

  def empty_batch(self, shape: tuple[int, ...]) -> Any:
    """Returns a batch of padding in one of the batches' `shapes`, or of rows and a length."""

  def loss(self, model: nnx.Module, batch: Any, rngs: nnx.Rngs | None = None) -> Loss:
    """Computes the loss of a batch, with dropout if `rngs` are given."""

  def make_report(
    self, run: "Run", data: Any, batches: Any
  ) -> Callable[[PyTree], tuple[dict[str, float], str]]:
    """Returns a function from parameters to values by name and a text, for the valid split."""
    return lambda params: ({}, "")

  def evaluate(self, run: "Run", data: Any, workdir: Path) -> "Evaluation | None":
    """Scores the trained model. Every process takes part; the first writes and has the result."""


class Run(NamedTuple):
  """A model with its task, vocabulary, mesh and parameters."""

  task: Task
  vocabulary: Any
  mesh: jax.sharding.Mesh
  graphdef: nnx.GraphDef
  params: nnx.State  # arrays, or their shapes
  steps: tuple[int, ...] = ()  # of the checkpoints whose average the parameters are

  @property
  def config(self) -> ConfigDict:
    """Returns the config of the task."""
    return self.task.config


class Evaluation(NamedTuple):
  """The scores of a trained model."""

  text: str  # tables and samples to print
  results: Mapping[str, Any]  # by split, for results.json
  scores: Mapping[str, Any]  # by split, for `experiments.evaluation.records`
  sentences: Mapping[str, list[list[int | float]]]  # likewise
  pictures: tuple[Path, ...] = ()  # image files


def cross_entropy(
  logits: Float[Array, "*B V"],
  targets: Int[Array, "*B"],
  *,
  smoothing: float = 0.0,
  pad: int = 0,
) -> Loss:
  """Computes the cross-entropy in nats with label smoothing, summed over tokens other
  than `pad`.

  The target distribution q has 1 - smoothing at the target and spreads `smoothing` over
  the other V - 1 entries. The entropy of q is subtracted, so that the loss is KL(q ||
  softmax(logits)): 0 if and only if the prediction is q. With smoothing 0 it is the
  negative log likelihood.

  Computed in float32 as logsumexp minus the target's logit and the sum of all logits:
  the backward pass is softmax minus q, and only the gradient takes memory for V entries
  per token. Szegedy et al. 2016, section 7; Shaw et al. 2018 have smoothing 0.1.
  """
  logits = logits.astype(jnp.float32)
  other = smoothing / (logits.shape[-1] - 1)
  target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  expected_logit = (1 - smoothing - other) * target_logits
  entropy = 0.0
  if smoothing:
    expected_logit += other * jnp.sum(logits, axis=-1)
    entropy = -float(
      (1 - smoothing) * np.log(1 - smoothing) + smoothing * np.log(other)
    )
  losses = jax.nn.logsumexp(logits, axis=-1) - expected_logit - entropy
  is_token = targets != pad
  return Loss(jnp.sum(losses, where=is_token), jnp.sum(is_token, dtype=jnp.int32))


def shift_right(targets: Int[Array, "B T"], bos: int) -> Int[Array, "B T"]:
  """Returns the decoder's input: `bos`, then every target but the last.

  >>> shift_right(jnp.array([[7, 8, 3, 0]]), bos=1).tolist()
  [[1, 7, 8, 3]]
  """
  return jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=bos)


@functools.cache
def _trace(kind: Callable[..., Any], config: str) -> None:
  task = kind(ConfigDict(json.loads(config)))
  vocabulary, shape = task.mock_vocabulary(), (1, task.config.batches.max_length)

  def loss(batch):
    return task.loss(
      task.make_model(vocabulary, nnx.Rngs(0)), batch, nnx.Rngs(dropout=0)
    )

  jax.eval_shape(loss, task.empty_batch(shape))


def own_copies(params: PyTree) -> PyTree:
  """Copies replicated arrays to this process, which can then compute without the others."""
  return jax.tree.map(jnp.asarray, jax.device_get(params))


def model_choices(kind: type) -> dict[str, tuple]:
  """Returns the choices of `config.model` by dotted key, from the types of a model's config."""
  return {
    f"model.{field.name}": get_args(field.type)
    for field in dataclasses.fields(kind)
    if get_origin(field.type) is Literal
  }


def model_values(config: ConfigDict) -> dict[str, Any]:
  """Returns the values of `config.model` as arguments of a model's config."""
  width, num_heads = config.model.width, config.model.num_heads
  if width % num_heads:
    raise ValueError(f"width is {width}; want a multiple of num_heads, {num_heads}")
  none = dict(implementation="", left=-1)  # what stands for None
  values = {key: None if none.get(key) == x else x for key, x in config.model.items()}
  if "positions" in values:
    values["positions"] = load_positions(values["positions"])
  return values


def load_positions(name: str) -> str | type[Positions]:
  """Returns the class that `module:Class` names, or the name of a scheme as it is.

  Raises InputError: it is neither, or there is no such class.
  """
  if name in get_args(PositionsName):
    return name
  problem = f"config.model.positions is {name!r}"
  if not re.fullmatch(r"\w+(\.\w+)*:\w+", name):
    known = ", ".join(get_args(PositionsName))
    raise InputError(f"{problem}: choose one of {known}, or give your own module:Class")
  module_name, _, class_name = name.partition(":")
  try:
    module = importlib.import_module(module_name)
  except ImportError as error:
    remedy = "start the command in the module's folder, or add that to PYTHONPATH"
    raise InputError(f"{problem}: {error}: {remedy}") from error
  if not hasattr(module, class_name):
    absent = f"{module_name} has no {class_name}"
    raise InputError(f"{problem}: {absent}: give one of its classes")
  kind = getattr(module, class_name)
  if not (isinstance(kind, type) and issubclass(kind, Positions)):
    base = "relpos_jax.nn.Positions"
    raise InputError(f"{problem}: {class_name} is no subclass of {base}: make it one")
  return kind


LAYER_CHECKS = (
  between(1, LARGEST, "batches.tokens", "batches.max_length", "batches.num_shapes"),
  between(1, 1000, "model.num_layers"),  # each layer is traced
  between(1, LARGEST, "model.width", "model.num_heads", "model.feed_forward"),
  rates(
    "model.embedding_dropout_rate", "model.dropout_rate", "model.attention_dropout_rate"
  ),
  rates("model.feed_forward_dropout_rate", "training.label_smoothing"),
)
TOKEN_CHECKS = (
  *LAYER_CHECKS,
  between(0, LARGEST, "model.max_distance"),
  between(-1, LARGEST, "model.left"),
)


def check_batches(config: ConfigDict, sizes: Mapping[str, int]) -> None:
  """Raises InputError unless batches of the longest rows divide over mesh and microbatches."""
  tokens, longest = config.batches.tokens, config.batches.max_length
  (together, _), num_parts = (
    multiples(sizes, config.mesh.ring),
    config.training.num_microbatches,
  )
  if tokens // longest < together * num_parts:
    raise InputError(
      f"config.batches.tokens is {tokens}, {tokens // longest} rows of config.batches.max_length "
      f"{longest}, which {together} devices and {num_parts} microbatches cannot divide: give "
      f"{longest * together * num_parts} tokens or more, or lower config.mesh.data"
    )


def longest_shape(config: ConfigDict, sizes: Mapping[str, int]) -> tuple[int, int]:
  """Returns rows and tokens of the batches of the longest examples, on a mesh of these sizes."""
  together, multiple = multiples(sizes, config.mesh.ring)
  longest = config.batches.max_length
  num_rows = max(1, config.batches.tokens // longest)
  together *= config.training.num_microbatches
  return round_up(num_rows, together), round_up(longest, multiple)


def batch_maker(
  config: ConfigDict,
  lengths: np.ndarray,
  mesh: AnyMesh,
  max_length: int | None = None,
  kind: Callable[..., Any] = Batches,
):
  """Returns a constructor of batches, in shapes that suit training examples of these
  lengths.

  A batch has room for one row of the largest length on each device, whatever
  `max_length` is.
  """
  together, multiple = multiples(mesh.shape, config.mesh.ring)
  longest = max_length or config.batches.max_length
  boundaries = bucket_boundaries(lengths, config.batches.num_shapes, max_length=longest)
  rows = together * config.training.num_microbatches
  # In training that is `tokens` on any mesh: `check_batches` refuses others.
  budget = max(config.batches.tokens, boundaries[-1] * rows)
  options = dict(multiple_of=rows, length_multiple_of=multiple)
  return functools.partial(kind, boundaries=boundaries, budget=budget, **options)
