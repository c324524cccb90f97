"""Describes the environment of a process: versions, hardware and commit."""

import contextlib
import datetime
import hashlib
import importlib
import importlib.metadata
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
from typing import Any

import jax

_PACKAGES = (
  "relpos_jax",
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "orbax-checkpoint",
  "grain",
  "numpy",
)


def environment(*packages: str) -> dict[str, Any]:
  """Describes the date, the command, the commit, versions of packages, and hardware.

  `packages` are added to the packages that are always described.
  """
  devices = jax.devices()
  date = datetime.datetime.now(datetime.UTC)
  cpu = cpuinfo("model name.*: (.*)") or platform.processor() or platform.machine()
  code = dict(
    date=date.isoformat(timespec="seconds"),
    command=shlex.join(["python", *sys.orig_argv[1:]]),
    git_commit=_git_commit(),
    python=platform.python_version(),
    packages={name: _version(name) for name in (*_PACKAGES, *packages)},
  )
  machine = dict(
    platform=platform.platform(),
    cpu=cpu,
    cpu_cores=count_cores(),
    devices=f"{len(devices)} x {devices[0].device_kind}",
    processes=jax.process_count(),
  )
  return code | machine


def count_cores() -> int | None:
  """Counts the cores that this process may use; all cores where that is unknown."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count()


def code_version() -> dict[str, str | None]:
  """Returns the versions of packages, and a digest of this project's sources.

  The keys are words for error messages. The sources are those that Python imports,
  because `relpos_jax` and `experiments` may come from different folders.
  """
  sources = hashlib.sha256()
  for name in ("relpos_jax", "experiments"):
    for folder in importlib.import_module(name).__path__:
      for file in sorted(pathlib.Path(folder).rglob("*.py")):
        sources.update(file.read_bytes())
  versions = {f"the version of {name}": _version(name) for name in _PACKAGES}
  digest = sources.hexdigest()[:12]
  return versions | {"the digest of relpos_jax and experiments": digest}


def short_commit(commit: str | None) -> str:
  """Shortens a commit's hash to 12 digits; keeps a mark such as -dirty."""
  return re.sub("([0-9a-f]{12})[0-9a-f]+", r"\1", commit or "unknown")


def _version(package: str) -> str | None:
  with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    return importlib.metadata.version(package)
  return None


def cpuinfo(pattern: str) -> str:
  """Searches /proc/cpuinfo for a pattern; returns its first group, or "" if absent."""
  path = pathlib.Path("/proc/cpuinfo")
  text = path.read_text() if path.exists() else ""
  match = re.search(pattern, text, re.MULTILINE)
  return match[1] if match else ""


def _git_commit() -> str | None:
  """Returns the commit of this checkout, marked as dirty if files differ from it.

  Files in results/ may differ, because commands write there.
  """
  try:
    commit = _git("describe", "--always", "--abbrev=40")
    changed = _git("diff", "--name-only", "HEAD", "--", ".", ":!results")
  except (OSError, subprocess.SubprocessError):
    return None
  return f"{commit}-dirty" if changed else commit


def _git(*words: str) -> str:
  folder = pathlib.Path(__file__).parents[2]
  command = ["git", "-C", folder, "--git-dir=.git", *words]
  return subprocess.check_output(
    command, stderr=subprocess.DEVNULL, text=True, timeout=10
  ).strip()
