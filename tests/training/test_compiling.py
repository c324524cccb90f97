"""Tests of the line that names the attention of a training, and its reasons."""

import logging

import jax
import jax.numpy as jnp
import pytest

from experiments.training.compiling import announce_attention
from experiments.training.step import TrainState
from relpos_jax import dot_product_attention


@pytest.fixture
def root_log(caplog):
  """Collects what the root logger's handlers get, as after logging.basicConfig()."""
  caplog.handler.setLevel(logging.NOTSET)
  return caplog


def run_now(work, *args):
  """Runs work at once, where a training compiles ahead in a thread."""
  work(*args)


def test_attention_is_named_once_and_the_log_keeps_its_level(root_log, capsys):
  @jax.jit
  def step(state, batch):
    return state, {"output": dot_product_attention(batch, batch, batch)}

  state, batch = TrainState(jnp.int32(0), (), ()), jnp.ones((1, 8, 2, 4))
  named = announce_attention(step, run_now, state, [])
  named(state, batch)
  named(state, batch)
  dot_product_attention(batch + 1, batch, batch)
  printed = capsys.readouterr().out.splitlines()
  assert len(printed) == 1 and printed[0].startswith("attention, batches of 1x8x2x4: ")
  assert not root_log.records
