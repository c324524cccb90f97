"""The run directory: whose it is, the files of its start, and the digests of its inputs."""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from experiments.config import flatten
from experiments.data.tokenizer import FILE
from experiments.errors import InputError
from experiments.files import Path, list_folder, write_whole
from experiments.training import processes
from experiments.training.checkpoint_reader import list_damaged, list_steps
from experiments.training.environment import environment
from relpos_jax.typing import PyTree

# Keys, or groups of keys, that may change when a run is resumed, since no step depends
# on them: neither its examples nor, up to rounding, what is computed. Only where a mesh
# pads sequences to shard them does dropout draw other numbers.
MAY_CHANGE = ("mesh", "data.pairs.test", "decoding", "evaluation")
MAY_CHANGE += ("training.num_steps", "training.num_epochs", "training.eval_every")
MAY_CHANGE += ("training.save_every", "training.keep_checkpoints")
MAY_CHANGE += ("training.num_samples", "training.max_skipped")

# Removed keys, and the value that a run must have to be read; others are refused as
# unknown.
_GONE = {
  ("batches", "packed"): False,
  ("model", "layers_shared"): False,
  ("training", "prng"): "threefry2x32",
  ("vocabulary", "joint"): True,
}

_DIGESTS = "digests.json"
_SHARED_SECONDS = 10  # until a file appears on a network file system


def claim_workdir(
  workdir: Path, config: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
  """Raises InputError unless a folder is empty or holds a run with this config.

  Both are values by dotted key. Only those of `MAY_CHANGE` may differ from the config
  of the run. Keys added since the run was started are compared with their `defaults`.
  Hidden files are ignored.
  """
  files = [path.name for path in list_folder(workdir) if not path.name.startswith(".")]
  if "config.json" not in files:
    if files:
      raise InputError(
        f"{workdir} holds {files[0]!r} but no run: give --workdir a new or empty folder"
      )
    return
  old = defaults | flatten(read_config(workdir))
  for name in config | old:
    before = json.dumps(old[name]) if name in old else "absent"
    now = json.dumps(config[name]) if name in config else "absent"
    if before != now and not _may_change(name):
      raise InputError(
        f"{workdir} holds the run of another config: {name} is {before} there and "
        f"{now} here: give another --workdir, or delete that folder"
      )


def _may_change(name: str) -> bool:
  return any(f"{name}.".startswith(f"{key}.") for key in MAY_CHANGE)


def check_not_lost(workdir: Path, lines: Sequence[Mapping[str, Any]]) -> None:
  """Raises InputError where checkpoints are lost, for example because a disk is not
  mounted.

  A step after the first save is in the `lines` of metrics.jsonl only once that save is
  complete.
  """
  folder = workdir / "checkpoints"
  if not lines or list_steps(folder) or list_damaged(folder):
    return
  if lines[-1]["step"] > read_json(workdir / "config.json")["training"]["save_every"]:
    raise InputError(
      f"the checkpoints in {folder} are gone, and the run has reached step {lines[-1]['step']}: "
      f"bring that folder back, or delete {workdir} to start again"
    )


def check_shared(workdir: Path) -> None:
  """Raises InputError unless each process sees what the first has written; all must call this."""
  processes.wait_for_all("written")
  file, until = workdir / "config.json", time.monotonic() + _SHARED_SECONDS
  # Listing a folder asks the file server; looking up a file may use a stale cache.
  while not (is_seen := file in list_folder(workdir)) and time.monotonic() < until:
    time.sleep(0.1)
  if processes.any_process(not is_seen):
    raise InputError(
      f"{workdir} is not one folder for all processes: give a --workdir that they share"
    )


def read_config(workdir: Path) -> dict[str, Any]:
  """Reads the config of a run as a config of today, if it is older."""
  config = read_json(workdir / "config.json")
  for (name, key), value in _GONE.items():
    group = config.get(name)
    if isinstance(group, dict) and group.get(key) == value:
      del group[key]
  data = config.get("data")
  pairs = data.get("pairs") if isinstance(data, dict) else None
  tests = pairs.get("test") if isinstance(pairs, dict) else None
  if isinstance(tests, dict):  # by name
    pairs["test"] = ";".join(f"{name}={files}" for name, files in tests.items())
  decoding = config.get("decoding")
  if isinstance(decoding, dict) and "beam_size" in decoding:
    decoding.setdefault("stop", "bound")  # as before there was a choice
  return config


def read_json(path: Path) -> dict[str, Any]:
  """Reads the JSON object in a file of a run; raises InputError if there is none."""
  remedy = "restore it, or name another run's folder"
  try:
    content = json.loads(path.read_bytes())
  except (OSError, ValueError) as error:
    raise InputError(f"cannot read {path} ({error}): {remedy}") from error
  if not isinstance(content, dict):
    raise InputError(f"{path} is no JSON object: {remedy}")
  return content


def write_run_files(workdir: Path, config: Mapping[str, Any], updates: int) -> None:
  """Writes config.json, and environment.json with the number of updates, at each start of a run."""
  where = environment() | dict(updates=updates)
  for name, content in (("config", config), ("environment", where)):
    text = json.dumps(content, indent=2, ensure_ascii=False)
    write_whole(workdir / f"{name}.json", text + "\n")


def data_digests(
  splits: Mapping[str, Any], files: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
  """Returns the digests of all splits but train, by name.

  `files` are those of test sets by split, if a user may give others: the same files
  must not change.
  """
  digests = {}
  for split, examples in splits.items():
    if split == "train":
      continue
    name = "validation data" if split == "valid" else f"{split} data"
    if split in files:
      name += f" {files[split]}"
    digests[name] = _digest(jax.tree.leaves([*examples]))
  return digests


def training_digest(examples: PyTree) -> dict[str, str]:
  """Returns the digest of the examples that batches are made of, by name."""
  return {"training data": _digest(jax.tree.leaves(examples))}


def check_unchanged(workdir: Path, digests: Mapping[str, str] | None = None) -> None:
  """Raises InputError unless the tokenizers, and inputs with these digests, are as
  recorded.

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
  if not (file := workdir / FILE).exists():
    return {}
  return dict(tokenizer=_digest([np.frombuffer(file.read_bytes(), np.uint8)]))


def _digest(items: Iterable[np.ndarray | str]) -> str:
  """Returns the SHA-256 of arrays, with their dtypes and shapes, and of texts, with their sizes."""
  found = hashlib.sha256()
  for item in items:
    array = np.frombuffer(item.encode(), np.uint8) if isinstance(item, str) else item
    found.update(f"{array.dtype}{array.shape}".encode())
    found.update(np.ascontiguousarray(array))
  return found.hexdigest()
