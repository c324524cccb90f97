"""Batches whose loss is not a number: one is skipped, several in a row end the training."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from chaos.run import kept, metrics, shapes, state_digests
from chaos.training import DISTURBED
from experiments.training.checkpoint import Checkpoints

pytestmark = pytest.mark.chaos

_MOST = 3  # skipped in a row
_NUM_STEPS = 12


def test_nan(number, training, tmp_path, rng, begin):
  # Every other time one batch, else all from one on. Every step is saved.
  workdir, batch, is_one = tmp_path / "run", rng.randint(2, _NUM_STEPS - _MOST), number % 2 == 0
  begin(f"batch {batch}" if is_one else f"batches {batch} to {_NUM_STEPS - 1}")
  poisoned = range(batch, batch + 1 if is_one else _NUM_STEPS)
  flags = dict(num_steps=_NUM_STEPS, save_every=1, keep_checkpoints=_NUM_STEPS, max_skipped=_MOST)
  flags = [f"--config.training.{name}={value}" for name, value in flags.items()]
  nan = f"--nan={','.join(map(str, poisoned))}"
  with training.started(workdir, *flags, nan, program=DISTURBED) as run:
    status = run.wait()
  last = batch + (1 if is_one else _MOST)  # step that is skipped
  if is_one:
    assert status == 0 and kept(workdir) == _NUM_STEPS, run.err()
  else:
    (line,) = training.messages(run)
    named = rf"stopped: step {last}: loss nan, .* on batch {last - 1} of .*, number {_MOST} skipped"
    assert status == 1 and re.match(named, line), run.err()
  lines = [line for line in metrics(workdir) if "loss" in line]
  whole = [line for line in metrics(training.undisturbed()) if "loss" in line]
  assert [line["step"] for line in lines if line["skipped"]] == [*range(batch + 1, last + 1)]
  assert lines[:batch] == whole[:batch], "the steps before differ"
  assert state_digests(workdir, batch) == state_digests(workdir, batch + 1)
  with Checkpoints(workdir / "checkpoints") as checkpoints:
    arrays = checkpoints.restore(like=shapes(workdir, kept(workdir))).values()
  assert all(np.isfinite(x).all() for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact))
