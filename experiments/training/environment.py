"""The environment of a process: versions, hardware and commit."""

import contextlib
import datetime
import functools
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
  """Returns date, command line, hardware, and versions, also of further packages."""
  devices = jax.devices()
  return dict(
    date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    command=shlex.join(["python", *sys.orig_argv[1:]]),
    git_commit=_git_commit(),
    python=platform.python_version(),
    packages={name: _version(name) for name in (*_PACKAGES, *packages)},
    platform=platform.platform(),
    cpu=cpuinfo("model name.*: (.*)") or platform.processor() or platform.machine(),
    cpu_cores=len(os.sched_getaffinity(0))
    if hasattr(os, "sched_getaffinity")
    else os.cpu_count(),
    devices=f"{len(devices)} x {devices[0].device_kind}",
    processes=jax.process_count(),
  )


def code_version() -> dict[str, str | None]:
  """Returns the versions of packages, and a digest of the sources of this project.

  The sources are those that are imported: the two packages may come from different
  folders.
  """
  sources = hashlib.sha256()
  for name in ("relpos_jax", "experiments"):
    for folder in importlib.import_module(name).__path__:
      for file in sorted(pathlib.Path(folder).rglob("*.py")):
        sources.update(file.read_bytes())
  versions = {f"the version of {name}": _version(name) for name in _PACKAGES}
  return versions | {"the digest of relpos_jax": sources.hexdigest()[:12]}


def short_commit(commit: str | None) -> str:
  """Shortens the hash in the git commit of `environment` to 12 digits."""
  return re.sub("([0-9a-f]{12})[0-9a-f]+", r"\1", commit or "unknown")


def _version(package: str) -> str | None:
  with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    return importlib.metadata.version(package)
  return None


def cpuinfo(pattern: str) -> str:
  """Returns the first group of a pattern in Linux's description of the CPU, or ""."""
  path = pathlib.Path("/proc/cpuinfo")
  found = re.search(pattern, path.read_text() if path.exists() else "", re.MULTILINE)
  return found[1] if found else ""


def _git_commit() -> str | None:
  """Returns the commit of this package's checkout, marked as dirty if files differ from
  it.

  Those in results/ may differ: commands write there.
  """
  git = ["git", "-C", pathlib.Path(__file__).parents[2], "--git-dir=.git"]
  run = functools.partial(
    subprocess.run, capture_output=True, text=True, timeout=10, check=True
  )
  with contextlib.suppress(OSError, subprocess.SubprocessError):
    commit = run([*git, "describe", "--always", "--abbrev=40"]).stdout.strip()
    changed = run([*git, "diff", "--name-only", "HEAD", "--", ".", ":!results"]).stdout
    return commit + "-dirty" * bool(changed)
  return None
