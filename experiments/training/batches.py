"""Chooses and checks the shapes of batches on a mesh."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments.data.batching import Batches, bucket_boundaries, prefetch, round_up
from experiments.errors import InputError
from experiments.training.sharding import AnyMesh, batch_multiples, put_batch


def check_batches(config: ConfigDict, sizes: Mapping[str, int]) -> None:
  """Raises InputError if the longest batches have too few rows for the mesh `sizes`.

  Each shard of the rows needs a row or more in each microbatch.
  """
  tokens, longest = config.batches.tokens, config.batches.max_length
  row_shards, _ = batch_multiples(sizes, config.mesh.ring)
  num_parts = config.training.num_microbatches
  least = longest * row_shards * num_parts
  if tokens < least:
    raise InputError(
      f"config.batches.tokens is {tokens}, {tokens // longest} rows of "
      f"config.batches.max_length {longest}, which {row_shards} shards of rows and "
      f"{num_parts} microbatches cannot divide: give {least} tokens or more, or lower "
      "config.training.num_microbatches or config.mesh.data"
    )


def longest_shape(config: ConfigDict, sizes: Mapping[str, int]) -> tuple[int, int]:
  """Returns the shape (rows, tokens) of the longest batches on a mesh."""
  row_shards, length_multiple = batch_multiples(sizes, config.mesh.ring)
  longest = config.batches.max_length
  num_rows = max(1, config.batches.tokens // longest)
  row_multiple = row_shards * config.training.num_microbatches
  return round_up(num_rows, row_multiple), round_up(longest, length_multiple)


def configure_batches(
  config: ConfigDict,
  lengths: np.ndarray,
  mesh: AnyMesh,
  max_length: int | None = None,
  kind: Callable[..., Any] = Batches,
):
  """Returns a function that makes batches of examples for a mesh.

  The function is the constructor `kind` with the options of the config. The caller adds
  the examples and the seed. Buckets are chosen for `lengths`, the lengths of all
  examples. Examples longer than `max_length` (by default the config's) are left out. A
  batch always has room for one row of the largest length on each device, even if the
  config allows fewer tokens.
  """
  row_shards, length_multiple = batch_multiples(mesh.shape, config.mesh.ring)
  row_multiple = row_shards * config.training.num_microbatches
  longest = max_length or config.batches.max_length
  boundaries = bucket_boundaries(lengths, config.batches.num_shapes, max_length=longest)
  # In training this is always `tokens`, because `check_batches` refuses fewer.
  budget = max(config.batches.tokens, boundaries[-1] * row_multiple)
  return functools.partial(
    kind,
    boundaries=boundaries,
    budget=budget,
    multiple_of=row_multiple,
    length_multiple_of=length_multiple,
  )


def load_batches(batches: Any, mesh: AnyMesh, start: int, stop: int) -> Iterator[Any]:
  """Yields the batches of steps `start` to `stop` - 1, sharded over the devices."""
  for batch in prefetch(batches, start, stop):
    yield put_batch(batch, mesh)
