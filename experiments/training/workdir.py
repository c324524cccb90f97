"""The run directory: whose it is, and the files of its start."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.config import flatten
from experiments.errors import InputError
from experiments.files import Path, in_bucket, list_folder, write_whole
from experiments.training import processes
from experiments.training.checkpoint_reader import list_damaged, list_steps
from experiments.training.environment import environment

# Keys, or groups of keys, that may change when a run is resumed, since no step depends on them.
MAY_CHANGE = ("mesh", "data.pairs.test", "decoding", "evaluation")
MAY_CHANGE += ("training.num_steps", "training.eval_every", "training.save_every")
MAY_CHANGE += ("training.keep_checkpoints", "training.num_samples", "training.max_skipped")

_SHARED_SECONDS = 10  # until a file appears on a network file system


def claim_workdir(workdir: Path, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
  """Raises InputError unless a folder is empty or holds a run with this config.

  Only the keys of `MAY_CHANGE` may differ from the config of the run. Keys added since the run was
  started are compared with their `defaults`. Hidden files are ignored.
  """
  files = [path.name for path in list_folder(workdir) if not path.name.startswith(".")]
  if "config.json" not in files:
    if files:
      raise InputError(
        f"{workdir} holds {files[0]!r} but no run: give --workdir a new or empty folder"
      )
    return
  old = flatten(defaults) | flatten(read_json(workdir / "config.json"))
  new = flatten(config)
  for name in new | old:
    before, now = (json.dumps(c[name]) if name in c else "absent" for c in (old, new))
    if before != now and not any(f"{name}.".startswith(f"{key}.") for key in MAY_CHANGE):
      raise InputError(
        f"{workdir} holds the run of another config: {name} is {before} there and {now} here: "
        "give another --workdir, or delete that folder"
      )


def check_not_lost(workdir: Path, lines: Sequence[Mapping[str, Any]]) -> None:
  """Raises InputError where checkpoints are lost, for example because a disk is not mounted.

  A step after the first save, or an evaluation at it, is in the `lines` of metrics.jsonl only once
  that save is complete.
  """
  folder = workdir / "checkpoints"
  if not lines or list_steps(folder) or list_damaged(folder):
    return
  first = read_json(workdir / "config.json")["training"]["save_every"]
  is_past = any(line["step"] >= first + ("valid_loss" not in line) for line in lines)
  if is_past or not (in_bucket(folder) or folder.is_dir()):
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


def read_json(path: Path) -> dict[str, Any]:
  """Reads a JSON file of a run directory; raises InputError if it cannot be read."""
  try:
    return json.loads(path.read_bytes())
  except (OSError, ValueError) as error:
    raise InputError(
      f"cannot read {path} ({error}): restore it, or name another run's folder"
    ) from error


def write_run_files(workdir: Path, config: Mapping[str, Any]) -> None:
  """Writes config.json and environment.json at each start of a run."""
  for name, content in (("config", config), ("environment", environment())):
    text = json.dumps(content, indent=2, ensure_ascii=False)
    write_whole(workdir / f"{name}.json", text + "\n")
