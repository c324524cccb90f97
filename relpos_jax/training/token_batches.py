"""What the tasks whose data are rows of tokens have in common: layers, and batches by a budget."""

import functools
from collections.abc import Mapping

import numpy as np
from ml_collections import ConfigDict

from relpos_jax.config import at_least, rates
from relpos_jax.data.batching import Batches, bucket_boundaries
from relpos_jax.errors import InputError
from relpos_jax.training.sharding import AnyMesh, num_rows_together

LAYERS = (
  at_least(1, "batches.tokens", "batches.max_length", "batches.num_shapes"),
  ("from 1 to 1000", lambda x: 1 <= x <= 1000, ("model.num_layers",)),  # each is traced
  at_least(1, "model.width", "model.num_heads", "model.feed_forward"),
  rates("model.embedding_dropout_rate", "model.dropout_rate", "model.attention_dropout_rate"),
  rates("model.feed_forward_dropout_rate", "training.label_smoothing"),
)
NUMBERS = (*LAYERS, at_least(0, "model.max_distance"))


def check_batches(config: ConfigDict, sizes: Mapping[str, int]) -> None:
  """Every batch, that of the longest rows too, is divided over the mesh and microbatches."""
  tokens, longest = config.batches.tokens, config.batches.max_length
  together, num_parts = num_rows_together(sizes), config.training.num_microbatches
  longest += -longest % sizes["sequence"]
  if tokens // longest < together * num_parts:
    raise InputError(
      f"config.batches.tokens is {tokens}, {tokens // longest} rows of config.batches.max_length "
      f"{longest}, which {together} devices and {num_parts} microbatches cannot divide: give "
      f"{longest * together * num_parts} tokens or more, or lower config.mesh.data"
    )


def batch_maker(
  config: ConfigDict, lengths: np.ndarray, mesh: AnyMesh, max_length: int | None = None
):
  """`Batches` of `config.batches`, with the shapes that fit training examples of these lengths.

  With another `max_length` than the config's, one longest example for each device at least.
  """
  boundaries = bucket_boundaries(
    lengths,
    config.batches.num_shapes,
    max_length=max_length or config.batches.max_length,
    multiple_of=mesh.shape["sequence"],
  )
  rows = num_rows_together(mesh.shape) * config.training.num_microbatches
  least = boundaries[-1] * rows if max_length else 0
  return functools.partial(
    Batches,
    boundaries=boundaries,
    token_budget=max(config.batches.tokens, least),
    multiple_of=rows,
  )
