"""What a run leaves in its folder, and how that differs from what it should be."""

import pathlib
from typing import Any, NamedTuple

from relpos_jax.training import shelf
from relpos_jax.training.manifest import Damage
from relpos_jax.training.reading import Reader
from relpos_jax.training.reporting import read_metrics

_OF_TIME = ("time", "tokens_per_second")


class Outcome(NamedTuple):
  """All that a run has computed: its metrics, and the digests of its last state."""

  metrics: list[dict[str, Any]]
  digests: dict[str, str]


def outcome_of(workdir: pathlib.Path) -> Outcome:
  """Reads all of the last state.

  Raises:
    Damage: it is.
  """
  return Outcome(metrics(workdir), digests(workdir, kept(workdir)))


def metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """The lines of metrics.jsonl without what depends on time."""
  return [{k: v for k, v in line.items() if k not in _OF_TIME} for line in read_metrics(workdir)]


def digests(workdir: pathlib.Path, step: int) -> dict[str, str]:
  """Of every array of a checkpoint, by name, once it was found to be what was saved."""
  reader = Reader(workdir / "checkpoints")
  reader.examine(step)
  return {name: entry.digest for name, entry in reader.entries(step).items()}


def state_digests(workdir: pathlib.Path, step: int) -> dict[str, str]:
  """`digests` without that of the step's own number."""
  return {name: digest for name, digest in digests(workdir, step).items() if name != "step"}


def damage(workdir: pathlib.Path, step: int) -> str:
  """What is damaged of a checkpoint; empty if nothing is, or the step is 0: none is saved."""
  try:
    if step:
      digests(workdir, step)
  except Damage as found:
    return f"step {step} is damaged: {found}"
  return ""


def reached(workdir: pathlib.Path) -> int:
  """The last step that was reported; 0 if none was."""
  return max((line["step"] for line in read_metrics(workdir) if "loss" in line), default=0)


def kept(workdir: pathlib.Path) -> int:
  """The last step that is saved; 0 if none is."""
  return max(shelf.numbered(workdir / "checkpoints"), default=0)


def difference(workdir: pathlib.Path, wanted: Outcome) -> str:
  """What of a run is not as it would have been; empty if all of it is, to the last bit."""
  try:
    found = outcome_of(workdir)
  except Damage as found:
    return f"the last checkpoint is damaged: {found}"
  if found.digests != wanted.digests:
    return "the final state is another than that of the undisturbed run"
  if found.metrics != wanted.metrics:
    return "metrics are others than those of the undisturbed run"
  return ""
