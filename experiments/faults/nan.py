"""Batches whose loss is not a number: one is skipped, a run of them ends the training in time."""

import pathlib
import random
import re
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from experiments.faults.outcome import kept, metrics, state_digests
from experiments.faults.subject import Subject
from experiments.faults.tries import Try, joined
from relpos_jax.training.checkpoint import Checkpoints
from relpos_jax.training.reading import Reader

MOST = 3  # skipped in a row
_NUM_STEPS = 12


def nan(subject: Subject, rng: random.Random, tries: int) -> Iterator[Try]:
  """Half of the tries are one batch, half a run of them; every step is saved."""
  for number in range(tries):
    batch = rng.randint(2, _NUM_STEPS - MOST)
    workdir = subject.folder / f"poisoned-{number}"
    yield (_run_of_them if number % 2 else _one)(subject, workdir, batch)


def _train(subject: Subject, workdir: pathlib.Path, batches: range) -> tuple[int, str]:
  """Trains on those batches poisoned; the exit status, and what was said."""
  flags = dict(num_steps=_NUM_STEPS, save_every=1, keep_checkpoints=_NUM_STEPS, max_skipped=MOST)
  flags = [f"--config.training.{name}={value}" for name, value in flags.items()]
  order = workdir.with_name(f"{workdir.name}.order")
  flags += [f"--batches={','.join(map(str, batches))}", f"--order={order}"]
  with subject.launched(workdir, *flags, program="faults.poisoned") as running:
    return running.wait(), running.log()


def _one(subject: Subject, workdir: pathlib.Path, batch: int) -> Try:
  status, _ = _train(subject, workdir, range(batch, batch + 1))
  problems = {
    f"exit status {status}": status != 0,
    "the last step is not saved": kept(workdir) != _NUM_STEPS,
    **_common(subject, workdir, batch, [batch + 1]),
  }
  return Try(f"batch {batch}", joined(problems))


def _run_of_them(subject: Subject, workdir: pathlib.Path, batch: int) -> Try:
  status, said = _train(subject, workdir, range(batch, _NUM_STEPS))
  last = batch + MOST
  named = rf"stopped: step {last}: loss nan, .* on batch {last - 1} of .*, number {MOST} skipped"
  problems = {
    f"exit status {status}": status != 1,
    "step and batch are not named": not re.search(named, said),
    **_common(subject, workdir, batch, [*range(batch + 1, last + 1)]),
  }
  return Try(f"batches {batch} to {_NUM_STEPS - 1}", joined(problems))


def _common(subject: Subject, workdir: pathlib.Path, batch: int, skipped: list[int]) -> dict:
  """What holds of both: what was skipped is counted, and changed nothing."""
  lines = [line for line in metrics(workdir) if "loss" in line]
  whole = [line for line in subject.undisturbed().metrics if "loss" in line]
  states = [state_digests(workdir, step) for step in (batch, batch + 1)]
  return {
    "others were skipped": [line["step"] for line in lines if line["skipped"]] != skipped,
    "the steps before are others": lines[:batch] != whole[:batch],
    "the step that was skipped changed the state": states[0] != states[1],
    "parameters are not finite": not _is_finite(workdir),
  }


def _is_finite(workdir: pathlib.Path) -> bool:
  """Whether the last state is, all of it."""
  with Checkpoints(workdir / "checkpoints") as checkpoints:
    like = Reader(checkpoints.folder).shapes(kept(workdir))
    arrays = checkpoints.restore(like=like).values()
  return all(np.isfinite(x).all() for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact))
