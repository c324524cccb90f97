"""Tests runs in a bucket of Google Cloud Storage, served on this machine."""

import json
import signal

import numpy as np
import pytest

pytest.importorskip("gcsfs")

import gcs_server

from experiments import train as train_command
from relpos_jax.files import to_path
from relpos_jax.training.workdir import list_steps

from test_train import _interrupt_at, metrics, results

RUN = "gs://bucket/runs/mine"


@pytest.fixture(scope="module")
def bucket():
  with gcs_server.serve() as server, pytest.MonkeyPatch.context() as patch:
    for name, value in server.env.items():
      patch.setenv(name, value)
    yield server


def test_a_run_in_a_bucket_goes_on_after_a_signal_and_equals_a_local_one(
  bucket, train, workdir, parameters, monkeypatch
):
  with monkeypatch.context() as patch:
    interrupt = lambda: signal.raise_signal(signal.SIGTERM)
    patch.setattr(train_command.Reporter, "step", _interrupt_at(7, interrupt))
    answer = train(RUN)
  print(answer.err, answer.out)
  assert answer.status == 0
  print("\n".join(bucket.names()))
  answer = train(RUN)
  print(answer.err, answer.out)
  assert answer.status == 0
  print("\n".join(bucket.names()))
  run = to_path(RUN)
  for ours, theirs in zip(parameters(run, 12), parameters(workdir, 12), strict=True):
    np.testing.assert_array_equal(ours, theirs)
  assert metrics(run) == metrics(workdir) and results(run) == results(workdir)
