"""The digests of a run's inputs, in digests.json of its run directory."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from experiments.data.tokenizer import tokenizer_files
from experiments.errors import InputError
from experiments.files import Path, write_whole
from experiments.training.workdir import read_json
from relpos_jax.typing import PyTree

_DIGESTS = "digests.json"


def data_digests(data: Any, examples: PyTree, name_split: Callable[[str], str]) -> dict[str, str]:
  """Returns the digests of the training examples and of the other splits of the data, by name."""
  digests = {"training data": _digest(jax.tree.leaves(examples))}
  for split in data.splits.keys() - {"train"}:
    digests[name_split(split)] = _digest(jax.tree.leaves([*data.splits[split]]))
  return digests


def check_unchanged(workdir: Path, digests: Mapping[str, str] | None = None) -> None:
  """Raises InputError unless the tokenizers, and inputs with these digests, are as recorded.

  Inputs without a recorded digest are not compared, since older runs have none.
  """
  path = workdir / _DIGESTS
  recorded = read_json(path) if path.exists() else {}
  for name, digest in ((digests or {}) | _tokenizer_digest(workdir)).items():
    if recorded.get(name, digest) != digest:
      raise InputError(
        f"the {name} of {workdir} changed since the run was started: restore it, give another "
        f"--workdir, or delete {_DIGESTS} there to go on with the new one"
      )


def write_digests(workdir: Path, digests: Mapping[str, str]) -> None:
  """Writes these digests and that of the tokenizers, which `check_unchanged` compares."""
  content = digests | _tokenizer_digest(workdir)
  write_whole(workdir / _DIGESTS, json.dumps(content, indent=2) + "\n")


def _tokenizer_digest(workdir: Path) -> dict[str, str]:
  contents = [np.frombuffer(file.read_bytes(), np.uint8) for file in tokenizer_files(workdir)]
  return dict(tokenizer=_digest(contents)) if contents else {}


def _digest(items: Iterable[np.ndarray | str]) -> str:
  """Returns the SHA-256 of arrays, with their dtypes and shapes, and of texts, with their sizes."""
  found = hashlib.sha256()
  for item in items:
    array = np.frombuffer(item.encode(), np.uint8) if isinstance(item, str) else item
    found.update(f"{array.dtype}{array.shape}".encode())
    found.update(np.ascontiguousarray(array))
  return found.hexdigest()
