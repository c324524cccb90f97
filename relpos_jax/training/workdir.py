"""The folder of a run: whose it is, what it was made with."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax

from relpos_jax.errors import InputError
from relpos_jax.files import write_whole
from relpos_jax.training import processes
from relpos_jax.training.checkpoint_files import check_path

# What a run may be continued with changed: keys, or groups of them, that no step depends on.
MAY_CHANGE = (
  "mesh",
  "training.num_steps",
  "training.eval_every",
  "training.save_every",
  "training.keep_checkpoints",
  "training.num_samples",
  "training.max_skipped",
  "data.pairs.test",
  "decoding",
  "evaluation",
)

_DIGESTS = "digests.json"
_SECONDS_TILL_SEEN = 10  # for files to come over a network

_PACKAGES = ("relpos_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def claim_workdir(
  workdir: str | os.PathLike, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> bool:
  """Finds that the folder is new, empty, or holds the run of this very config, to be continued.

  Only the keys of `MAY_CHANGE` may differ from those of the run; a key younger than the run had the
  value of `defaults`. Files whose names begin with a dot
  do not count. Nothing is made or changed: a folder that is not there must be one that can be made.

  Returns:
    Whether there is a run to continue.

  Raises:
    InputError: the folder holds another config's run or other files, or cannot be made or written,
      or checkpoints cannot be kept under its path.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   new = claim_workdir(folder, dict(seed=0))
  ...   write_run_files(folder, dict(seed=0))
  ...   print(new, claim_workdir(folder, dict(seed=0)))
  False True
  """
  workdir = pathlib.Path(workdir)
  check_path(workdir)
  try:
    nearest = next(path for path in (workdir, *workdir.absolute().parents) if path.exists())
    files = sorted(path.name for path in nearest.iterdir() if not path.name.startswith("."))
  except OSError as error:
    raise InputError(f"cannot use {workdir} ({error.strerror}): give another --workdir") from error
  check_writable(nearest)
  if nearest != workdir:
    return False
  if "config.json" not in files:
    if files:
      raise InputError(
        f"{workdir} holds {files[0]!r} but no run: give --workdir a new or empty folder"
      )
    return False
  _compare(workdir, _flatten(defaults or {}) | _flatten(read_json(workdir / "config.json")), config)
  return True


def check_shared(workdir: pathlib.Path) -> None:
  """Finds that all processes of a run see the files that the first has written; all call this.

  Raises:
    InputError: one of them has another folder of this name.
  """
  processes.wait_for_all("written")
  until = time.monotonic() + _SECONDS_TILL_SEEN
  # A folder that is listed is as its server has it; a file that is asked for may be from a cache.
  while not (is_seen := "config.json" in _names(workdir)) and time.monotonic() < until:
    time.sleep(0.1)
  if processes.any_process(not is_seen):
    raise InputError(
      f"{workdir} is not one folder for all processes: give a --workdir that they share"
    )


def _names(folder: pathlib.Path) -> list[str]:
  return os.listdir(folder) if folder.is_dir() else []


def check_writable(
  folder: pathlib.Path, remedy: str = "give a --workdir that you may write to"
) -> None:
  """Raises InputError unless files may be made in the folder: better now than after the work."""
  if not os.access(folder, os.W_OK):
    raise InputError(f"cannot write into {folder}: {remedy}")


def _compare(workdir: pathlib.Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
  new = _flatten(new)
  for name in new | old:
    there, here = (json.dumps(c[name]) if name in c else "absent" for c in (old, new))
    if there != here and not any(f"{name}.".startswith(f"{key}.") for key in MAY_CHANGE):
      raise InputError(
        f"{workdir} holds the run of another config: {name} is {there} there and {here} here: "
        "give another --workdir, or delete that folder"
      )


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  flat = {}
  for key, value in config.items():
    flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
  return flat


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """The object in a JSON file of a run's folder.

  Raises:
    InputError: the file cannot be read, or holds something else.
  """
  try:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
      raise ValueError("not a JSON object")
    return content
  except (OSError, ValueError) as error:
    raise InputError(f"cannot read {path} ({error}): name the folder of a whole run") from error


def write_run_files(workdir: str | os.PathLike, config: Mapping[str, Any]) -> None:
  """Writes config.json, the values of the config, and environment.json, what they run on.

  Makes the folder where there is none. Written at each start of a run: the environment is that of
  the last one.
  """
  pathlib.Path(workdir).mkdir(parents=True, exist_ok=True)
  for name, content in (("config", config), ("environment", environment())):
    text = json.dumps(content, indent=2, ensure_ascii=False)
    write_whole(pathlib.Path(workdir, f"{name}.json"), text + "\n")


def changed_data(workdir: pathlib.Path, digests: Mapping[str, str]) -> str:
  """Compares what a run reads with what it read at its start; returns a refusal, or nothing.

  What digests.json does not name is not compared: runs from before there was one have none.
  """
  path = workdir / _DIGESTS
  recorded = read_json(path) if path.exists() else {}
  for name, digest in digests.items():
    if recorded.get(name, digest) != digest:
      return (
        f"the {name} of {workdir} changed since the run was started: restore it, give another "
        f"--workdir, or delete {_DIGESTS} there to go on with the new one"
      )
  return ""


def write_digests(workdir: pathlib.Path, digests: Mapping[str, str]) -> None:
  """Writes digests.json, which `changed_data` compares."""
  write_whole(workdir / _DIGESTS, json.dumps(digests, indent=2) + "\n")


def environment() -> dict[str, Any]:
  """Date, command line, versions and hardware of this process.

  >>> environment()["processes"]
  1
  """
  devices = jax.devices()
  return dict(
    date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    command=shlex.join(["python", *sys.orig_argv[1:]]),
    git_commit=_git_commit(),
    python=platform.python_version(),
    packages={name: _version(name) for name in _PACKAGES},
    platform=platform.platform(),
    cpu=_cpu_model(),
    cpu_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    devices=f"{len(devices)} x {devices[0].device_kind}",
    processes=jax.process_count(),
  )


def short_commit(commit: str | None) -> str:
  """The first letters of a commit's hash, as `environment` gives it, and all that stands around.

  >>> short_commit(40 * "a" + "-dirty"), short_commit(None)
  ('aaaaaaaaaaaa-dirty', 'unknown')
  """
  return re.sub("([0-9a-f]{12})[0-9a-f]+", r"\1", commit or "unknown")


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _cpu_model() -> str:
  cpuinfo = pathlib.Path("/proc/cpuinfo")
  if cpuinfo.exists():
    for line in cpuinfo.read_text().splitlines():
      if line.startswith("model name"):
        return line.partition(":")[2].strip()
  return platform.processor() or platform.machine()


def _git_commit() -> str | None:
  """The commit of this package's own checkout, marked where files differ from it."""
  checkout = pathlib.Path(__file__).parents[2]
  if not (checkout / ".git").exists():
    return None
  command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40"]
  try:
    result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
  except (OSError, subprocess.SubprocessError):
    return None
  return result.stdout.strip()
