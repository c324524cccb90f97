"""Reads what a run has left in its folder."""

import pathlib
from typing import Any

from relpos_jax.training import checkpoint_files
from relpos_jax.training.checkpoint_reader import Reader
from relpos_jax.training.metrics import read_metrics

_OF_TIME = ("time", "tokens_per_second")


def metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the lines of metrics.jsonl without the values that depend on time."""
  return [{k: v for k, v in line.items() if k not in _OF_TIME} for line in read_metrics(workdir)]


def losses(workdir: pathlib.Path) -> dict[int, float | None]:
  """Returns the training loss by step, None where it was not a number."""
  return {line["step"]: line["loss"] for line in read_metrics(workdir) if "loss" in line}


def digests(workdir: pathlib.Path, step: int) -> dict[str, str]:
  """Returns the digest of every array of a checkpoint; raises Damage if one is another."""
  reader = Reader(workdir / "checkpoints")
  reader.examine(step)
  return {name: entry.digest for name, entry in reader.entries(step).items()}


def state_digests(workdir: pathlib.Path, step: int) -> dict[str, str]:
  """Returns the digests without that of the step's own number."""
  return {name: digest for name, digest in digests(workdir, step).items() if name != "step"}


def reached(workdir: pathlib.Path) -> int:
  """Returns the last step that was reported, 0 if none was."""
  return max(losses(workdir), default=0)


def kept(workdir: pathlib.Path) -> int:
  """Returns the last step that is saved, 0 if none is."""
  return max(checkpoint_files.list_steps(workdir / "checkpoints"), default=0)
