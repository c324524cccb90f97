"""Keeps the average of a run's checkpoints in a file, which is read without Orbax."""

import contextlib
import hashlib
import json
import pathlib
import zipfile
from collections.abc import Sequence

import jax
import numpy as np

from experiments.files import Path, whole_file
from experiments.training.manifest import by_name, describe
from relpos_jax.typing import PyTree


def key_of(folder: Path, steps: Sequence[int]) -> str:
  """Names steps with the digests of their manifests: one that is saved anew has another name."""
  files = {step: folder / str(step) / "manifest" / "metadata" for step in steps}
  return json.dumps(
    {step: hashlib.sha256(x.read_bytes()).hexdigest() for step, x in files.items() if x.exists()}
  )


def read_average(file: pathlib.Path, key: str, like: PyTree) -> PyTree | None:
  """Returns the average that is kept for a key; None if it is another, damaged or not there."""
  wanted = by_name(like)
  with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
    with np.load(file) as kept:
      found = {name: kept[name] for name in wanted} if kept["key"].item() == key else {}
    if [*map(describe, found.values())] == [*map(describe, wanted.values())]:
      shardings = [getattr(x, "sharding", None) for x in wanted.values()]
      leaves = jax.device_put([*found.values()], shardings)
      return jax.tree.unflatten(jax.tree.structure(like), leaves)
  return None


def write_average(file: pathlib.Path, key: str, average: PyTree) -> None:
  """Keeps an average for a key, unless the folder cannot be written."""
  arrays = {name: np.asarray(x) for name, x in by_name(average).items()}
  with contextlib.suppress(OSError), whole_file(file) as content:
    np.savez(content, key=key, **arrays)
