"""Averages the parameters of a run's last checkpoints."""

import contextlib
import io
import json
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.files import whole_file, with_digest, without_digest
from experiments.training import checkpoint_reader, processes
from experiments.training.checkpoint import Checkpoints
from experiments.training.checkpoint_reader import by_name, describe
from relpos_jax.typing import PyTree


def average_last(
  checkpoints: Checkpoints,
  num: int,
  *,
  like: PyTree,
  part: float = 0.2,
  since: int = 0,
  keep: pathlib.Path | None = None,
) -> tuple[PyTree, list[int]]:
  """Averages `params` over the last good checkpoints; returns them and the steps.

  At most `num` are averaged: those in the last `part` of the steps of the newest, from
  step `since` on, or the newest alone. Parameters that still change fast have a mean
  worse than the last. A step between two saves counts only while it is the newest.
  Vaswani et al. 2017, section 6.1.

  Args:
    like: has the structure, shapes, dtypes and shardings of the result. The sum is in
      float32.
    keep: a local file that keeps the average. It is read again while the checkpoints
      are the same, unless a damaged one was passed over.

  Raises InputError: there is no good checkpoint, or it is of another model.
  """
  folder = checkpoints.folder
  newest = checkpoints.steps()[-1:]
  steps = sorted({*checkpoint_reader.list_regular(folder), *newest}, reverse=True)
  digests = checkpoint_reader.digests_of(folder, steps)
  kinds = {name: describe(array) for name, array in by_name(like).items()}
  key = json.dumps([digests, kinds, num, part, since])
  kept = read_average(keep, key, like) if keep else None
  if kept is None:
    total, averaged, num_damaged = _sum_last(checkpoints, steps, num, like, part, since)
    if not averaged:
      raise checkpoint_reader.none_good(folder)
    mean = _divide(total, len(averaged), like)
    if keep and not num_damaged:
      write_average(keep, key, mean, averaged)
  else:
    mean, averaged = kept
  if len(averaged) < num:
    names = ", ".join(map(str, averaged))
    processes.print_once(
      f"averages {names} alone: {folder} has fewer than {num} good checkpoints in the "
      f"last {part:.0%} of the steps, after the warmup"
    )
  return mean, averaged


def _sum_last(
  checkpoints: Checkpoints,
  steps: Sequence[int],
  num: int,
  like: PyTree,
  part: float,
  since: int,
) -> tuple[PyTree, list[int], int]:
  """Returns the sum, its steps in order, and how many damaged ones were passed over."""
  total, summed, num_damaged = None, [], 0
  first = 0
  for step in steps:
    if step < first or len(summed) == num:
      break
    params = checkpoints.read(step, like, "params")
    if params is None:
      num_damaged += 1
      continue
    if summed:
      total = _add(total, params)
    else:
      total = params
      first = max(since, (1 - part) * step)
    summed.append(step)
  return total, summed[::-1], num_damaged


@jax.jit
def _add(total: PyTree, params: PyTree) -> PyTree:
  def add(x, y):
    return x.astype(jnp.float32) + y.astype(jnp.float32)

  return jax.tree.map(add, total, params)


def _divide(total: PyTree, count: int, like: PyTree) -> PyTree:
  def divide(x, to):
    return (x.astype(jnp.float32) / count).astype(to.dtype)

  return jax.jit(lambda total: jax.tree.map(divide, total, like))(total)


def read_average(
  file: pathlib.Path, key: str, like: PyTree
) -> tuple[PyTree, list[int]] | None:
  """Returns the average that is kept for a key, and its steps.

  Returns None if it is for another key, damaged or not there.
  """
  try:
    content = without_digest(file.read_bytes())
  except (OSError, ValueError):
    return None
  leaves, shardings = [], []
  with np.load(io.BytesIO(content)) as arrays:
    if arrays["key"].item() != key:
      return None
    steps = arrays["steps"].tolist()
    for name, leaf in by_name(like).items():
      leaves.append(arrays[name].view(leaf.dtype))  # NumPy forgets bfloat16
      shardings.append(getattr(leaf, "sharding", None))
  leaves = jax.device_put(leaves, shardings)
  return jax.tree.unflatten(jax.tree.structure(like), leaves), steps


def write_average(
  file: pathlib.Path, key: str, average: PyTree, steps: Sequence[int]
) -> None:
  """Keeps an average for a key, unless the folder cannot be written."""
  arrays = {name: np.asarray(leaf) for name, leaf in by_name(average).items()}
  content = io.BytesIO()
  np.savez(content, key=key, steps=steps, **arrays)
  with contextlib.suppress(OSError), whole_file(file) as opened:
    opened.write(with_digest(content.getvalue()))
