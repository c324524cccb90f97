"""Checks and writes a run directory: config, environment and digests of inputs."""

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
from experiments.evaluation.records import RECIPE
from experiments.files import Path, list_folder, write_whole
from experiments.training import processes
from experiments.training.checkpoint_reader import list_damaged, list_steps
from experiments.training.environment import environment
from relpos_jax.typing import PyTree

# Keys, or groups of keys, that may change when a run is resumed. No step depends on
# them: its examples stay the same, and its results up to rounding. The one exception is
# a mesh that pads sequences to shard them, because dropout masks then differ.
MAY_CHANGE = (
  "mesh",
  "data.pairs.test",
  "batches.valid_length",
  "training.num_steps",
  "training.num_epochs",
  "training.eval_every",
  "training.save_every",
  "training.keep_checkpoints",
  "training.num_samples",
  "training.max_skipped",
  "training.score_tests",
  "decoding",
  "evaluation",
)

# Keys that were removed. A run with the value here can still be read; with another
# value, the key is refused as unknown.
_REMOVED_KEYS = {
  "batches.packed": False,
  "model.layers_shared": False,
  "training.prng": "threefry2x32",
  "vocabulary.joint": True,
}

_DIGESTS = "digests.json"
_ENVIRONMENT = "environment.json"
_OLD_RECIPE = 2  # of runs that do not name theirs
_SHARED_SECONDS = 90  # NFS may show a new file a minute late


def check_workdir(
  workdir: Path, config: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
  """Raises InputError unless a run with this config may use the folder.

  The folder must be empty, or hold a run with the same config, by code of the same
  `RECIPE`. `config` and `defaults` are values by dotted key. The keys of `MAY_CHANGE`
  may differ. A run that is older than a key counts as a run with the key's default.
  Hidden files are ignored.
  """
  files = [path.name for path in list_folder(workdir) if not path.name.startswith(".")]
  if "config.json" not in files:
    if files:
      raise InputError(
        f"{workdir} holds {files[0]!r} but no run: give --workdir a new or empty folder"
      )
    return
  old = defaults | read_config(workdir)
  for name in config | old:
    before = json.dumps(old[name]) if name in old else "absent"
    now = json.dumps(config[name]) if name in config else "absent"
    if before != now and not _may_change(name):
      raise InputError(
        f"{workdir} holds the run of another config: {name} is {before} there and "
        f"{now} here: give another --workdir, or delete that folder"
      )
  _check_recipe(workdir)


def _check_recipe(workdir: Path) -> None:
  """Raises InputError if code of another recipe trained the run."""
  # A run that was killed before its first step may have no environment yet.
  has_environment = (workdir / _ENVIRONMENT).exists()
  if has_environment and read_environment(workdir)["recipe"] != RECIPE:
    raise InputError(
      f"{workdir} holds a run by other code, which computes other numbers: "
      "give another --workdir, or delete that folder"
    )


def _may_change(name: str) -> bool:
  return any(f"{name}.".startswith(f"{key}.") for key in MAY_CHANGE)


def check_not_lost(workdir: Path, lines: Sequence[Mapping[str, Any]]) -> None:
  """Raises InputError if a run has lost its checkpoints, as with an unmounted disk.

  `lines` are the lines of metrics.jsonl. If they go beyond the step of the first save,
  there was a checkpoint, because a run waits for its first save to finish.
  """
  folder = workdir / "checkpoints"
  if not lines or list_steps(folder) or list_damaged(folder):
    return
  if lines[-1]["step"] > read_json(workdir / "config.json")["training"]["save_every"]:
    raise InputError(
      f"the checkpoints in {folder} are gone, and the run has reached step "
      f"{lines[-1]['step']}: bring that folder back, or delete {workdir} to start again"
    )


def check_shared(workdir: Path) -> None:
  """Raises InputError unless all processes share the folder; all must call this."""
  processes.wait_for_all("written")
  file, until = workdir / "config.json", time.monotonic() + _SHARED_SECONDS
  # A listing may be of an old cache, too, but not for as long as a look-up.
  is_shared = file in list_folder(workdir)
  while not is_shared and time.monotonic() < until:
    time.sleep(0.1)
    is_shared = file in list_folder(workdir)
  if processes.any_process(not is_shared):
    raise InputError(
      f"{workdir} is not one folder for all processes: give a --workdir that they share"
    )


def read_config(workdir: Path) -> dict[str, Any]:
  """Reads the values of a run's config, by dotted key; converts an older config."""
  config = flatten(read_json(workdir / "config.json"))
  for key, value in _REMOVED_KEYS.items():
    if config.get(key) == value:
      del config[key]
  prefix = "data.pairs.test."  # test sets by name
  tests = []
  for key in list(config):
    if key.startswith(prefix):
      tests.append(f"{key.removeprefix(prefix)}={config.pop(key)}")
  if tests:
    config["data.pairs.test"] = ";".join(tests)
  if "decoding.beam_size" in config:
    # The only rule before there was a choice.
    config.setdefault("decoding.stop", "bound")
  return config


def read_environment(workdir: Path) -> dict[str, Any]:
  """Reads where and by which code a run was trained, including its recipe."""
  facts = read_json(workdir / _ENVIRONMENT)
  facts.setdefault("recipe", _OLD_RECIPE)
  return facts


def read_json(path: Path) -> dict[str, Any]:
  """Reads a JSON object from a file of a run; raises InputError if it cannot."""
  remedy = "restore it, or name another run's folder"
  try:
    content = json.loads(path.read_bytes())
  except (OSError, ValueError) as error:
    raise InputError(f"cannot read {path} ({error}): {remedy}") from error
  if not isinstance(content, dict):
    raise InputError(f"{path} is no JSON object: {remedy}")
  return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
  """Writes a JSON object into a file of a run."""
  write_whole(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_run_files(
  workdir: Path, config: Mapping[str, Any], updates: int, is_trained: bool = False
) -> None:
  """Writes config.json, and environment.json, which includes the number of updates.

  If the run `is_trained`, the environment stays that of its training.
  """
  if is_trained:
    facts = read_environment(workdir)
  else:
    facts = environment() | dict(recipe=RECIPE)
  facts["updates"] = updates
  write_json(workdir / "config.json", config)
  write_json(workdir / _ENVIRONMENT, facts)


def data_digests(
  splits: Mapping[str, Any], files: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
  """Returns a digest of each split except train.

  The keys are "validation data" and, for test sets, "SPLIT data". `files` has the files
  of a user's own test sets, by split. These are part of the key: "SPLIT data FILES". So
  a resumed run may have other files, but the content of a file must not change.
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
  """Returns the digest of the training examples, under the key "training data"."""
  return {"training data": _digest(jax.tree.leaves(examples))}


def check_unchanged(workdir: Path, digests: Mapping[str, str] | None = None) -> None:
  """Raises InputError if the tokenizer or an input differs from its recorded digest.

  Inputs without a recorded digest are not compared, because older runs have none.
  """
  path = workdir / _DIGESTS
  recorded = read_json(path) if path.exists() else {}
  for name, digest in ((digests or {}) | _tokenizer_digest(workdir)).items():
    if recorded.get(name, digest) != digest:
      raise InputError(
        f"the {name} of {workdir} changed since the run was started: restore it, "
        f"give another --workdir, or delete {_DIGESTS} there to go on with the new one"
      )


def write_digests(workdir: Path, digests: Mapping[str, str]) -> None:
  """Writes the digests of inputs and tokenizer for `check_unchanged`."""
  write_json(workdir / _DIGESTS, digests | _tokenizer_digest(workdir))


def _tokenizer_digest(workdir: Path) -> dict[str, str]:
  if not (file := workdir / FILE).exists():
    return {}
  return dict(tokenizer=_digest([np.frombuffer(file.read_bytes(), np.uint8)]))


def _digest(items: Iterable[np.ndarray | str]) -> str:
  """Computes the SHA-256 of arrays and texts, including dtypes and shapes."""
  digest = hashlib.sha256()
  for item in items:
    array = np.frombuffer(item.encode(), np.uint8) if isinstance(item, str) else item
    digest.update(f"{array.dtype}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array))
  return digest.hexdigest()
