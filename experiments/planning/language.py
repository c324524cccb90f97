"""The training step of a decoder-only model, of the parts that translation has."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from configs import default
from experiments.validation import check_types
from relpos_jax.errors import InputError
from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig
from relpos_jax.training.sharding import AnyMesh, mesh_sizes, num_rows_together

TASK = "language_model"


def is_language_model(config: ConfigDict) -> bool:
  """Whether the config is of a model without source sentences."""
  return config.get("task", "") == TASK


class WithoutSource(nnx.Module):
  """A language model, called as the training step calls a model that translates."""

  def __init__(self, config: LanguageModelConfig, *, rngs: nnx.Rngs):
    self.model = LanguageModel(config, rngs=rngs)

  def __call__(self, source, tokens, rngs: nnx.Rngs | None = None):
    return self.model(tokens, rngs)


def plan_language_model(config: ConfigDict) -> tuple[nnx.GraphDef, nnx.State]:
  """The model of `config.model`, and its parameters' shapes."""
  values = _model_config(config)
  return nnx.split(nnx.eval_shape(lambda: WithoutSource(values, rngs=nnx.Rngs(0))))


def shape_of_batches(config: ConfigDict, mesh: AnyMesh) -> tuple[int, int]:
  """[rows, tokens] of every batch: as many whole rows as `config.batches.tokens` holds."""
  length = config.batches.max_length
  together = num_rows_together(mesh.shape)
  return config.batches.tokens // length // together * together, length


def validate(config: ConfigDict, num_devices: int) -> None:
  """Holds the values that a plan needs against their meaning.

  Raises:
    InputError: names the first value that is wrong, and the remedy.
  """
  defaults = default.get_config()
  defaults.task = TASK
  check_types(config, defaults)
  sizes = mesh_sizes(num_devices, **config.mesh)
  tokens, length = config.batches.tokens, config.batches.max_length
  if length % sizes["sequence"]:
    raise InputError(
      f"config.batches.max_length is {length}: give a multiple of "
      f"config.mesh.sequence, {sizes['sequence']}"
    )
  if tokens < (wanted := length * num_rows_together(sizes)):
    raise InputError(
      f"config.batches.tokens is {tokens}: give {wanted} or more, a sequence for each of "
      "config.mesh.data times fsdp"
    )
  try:
    _trace(dataclasses.replace(_model_config(config), num_layers=1), length)
  except (ValueError, NotImplementedError) as error:
    raise InputError(f"config.model: {' '.join(str(error).split())}") from error


def _trace(config: LanguageModelConfig, length: int) -> None:
  """Computes nothing: what the model refuses, it refuses here."""
  run = lambda tokens: LanguageModel(config, rngs=nnx.Rngs(0))(tokens)
  jax.eval_shape(run, jax.ShapeDtypeStruct((1, length), jnp.int32))


def _model_config(config: ConfigDict) -> LanguageModelConfig:
  names = {field.name for field in dataclasses.fields(LanguageModelConfig)}
  values = {name: x for name, x in config.model.to_dict().items() if name in names}
  values |= dict(implementation=config.model.implementation or None)
  return LanguageModelConfig(vocab_size=config.vocabulary.size, **values)
