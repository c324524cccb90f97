"""Averages the parameters of a run's last checkpoints."""

import contextlib
import io
import json
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.files import append_digest, remove_digest, replace_file
from experiments.training import processes
from experiments.training.checkpoint import Checkpoints
from experiments.training.checkpoint_reader import (
  describe,
  explain_missing,
  list_regular,
  name_leaves,
  read_digests,
)
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
  """Averages `params` over the last good checkpoints; returns the mean and the steps.

  At most `num` checkpoints are averaged (Vaswani et al. 2017, section 6.1). They are
  from step `since` on, and from the last `part` of the steps so far: while parameters
  still change fast, their mean is worse than the last ones. The newest checkpoint
  always counts. All others must be regular saves, not saves that a signal caused.

  Args:
    like: gives the structure, shapes, dtypes and shardings of the result. The sum is in
      float32.
    keep: a local file that caches the average. It is used again while the checkpoints
      are the same. Nothing is cached if a damaged checkpoint was passed over.

  Raises InputError if there is no good checkpoint, or if it is of another model.
  """
  folder = checkpoints.folder
  newest = checkpoints.steps()[-1:]
  steps = sorted({*list_regular(folder), *newest}, reverse=True)
  processes.check_same({"the list of checkpoints in --workdir": steps})
  cached = None
  if keep:
    kinds = {name: describe(array) for name, array in name_leaves(like).items()}
    key = json.dumps([read_digests(folder, steps), kinds, num, part, since])
    cached = read_average(keep, key, like)
  if cached:
    average, averaged = cached
  else:
    average, averaged, is_whole = _average_good(
      checkpoints, steps, num, like, part, since
    )
    if keep and is_whole:
      write_average(keep, key, average, averaged)
  if len(averaged) < num:
    names = ", ".join(map(str, averaged))
    processes.print_once(
      f"averages {names} alone: {folder} has fewer than {num} good checkpoints in the "
      f"last {part:.0%} of the steps, after the warmup"
    )
  return average, averaged


def _average_good(
  checkpoints: Checkpoints,
  steps: Sequence[int],
  num: int,
  like: PyTree,
  part: float,
  since: int,
) -> tuple[PyTree, list[int], bool]:
  """Averages the first good checkpoints of `steps`, which begin with the newest.

  Returns the average, its steps, and whether no checkpoint was damaged.
  """
  averaged, first, is_whole = [], 0, True
  for step in steps:
    if step < first or len(averaged) == num:
      break
    params = checkpoints.read(step, like, "params")
    if params is None:
      is_whole = False
      continue
    if averaged:
      total = _add(total, params)
    else:
      total = params
      first = max(since, (1 - part) * step)  # earlier steps do not count
    averaged.append(step)
  if not averaged:
    raise explain_missing(checkpoints.folder)
  averaged.reverse()
  return _divide(total, len(averaged), like), averaged, is_whole


@jax.jit
def _add(*trees: PyTree) -> PyTree:
  return optax.tree.add(*optax.tree.cast(trees, jnp.float32))


def _divide(total: PyTree, count: int, like: PyTree) -> PyTree:
  def divide(x, to):
    return (x / count).astype(to.dtype)

  return jax.jit(lambda total: jax.tree.map(divide, total, like))(total)


def read_average(
  file: pathlib.Path, key: str, like: PyTree
) -> tuple[PyTree, list[int]] | None:
  """Reads a cached average and its steps.

  Returns None if the file is missing, damaged, or for another key.
  """
  try:
    content = remove_digest(file.read_bytes())
  except (OSError, ValueError):
    return None
  leaves = []
  with np.load(io.BytesIO(content)) as arrays:
    if arrays["key"].item() != key:
      return None
    steps = arrays["steps"].tolist()
    for name, leaf in name_leaves(like).items():
      array = arrays[name].view(leaf.dtype)  # NumPy's format has no bfloat16
      leaves.append(jax.device_put(array, leaf.sharding))
  return jax.tree.unflatten(jax.tree.structure(like), leaves), steps


def write_average(
  file: pathlib.Path, key: str, average: PyTree, steps: Sequence[int]
) -> None:
  """Caches an average for a key, unless the folder is read-only."""
  arrays = {name: np.asarray(leaf) for name, leaf in name_leaves(average).items()}
  content = io.BytesIO()
  np.savez(content, key=key, steps=steps, **arrays)
  with contextlib.suppress(OSError), replace_file(file) as opened:
    opened.write(append_digest(content.getvalue()))
