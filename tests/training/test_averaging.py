"""Averages are means of the last good checkpoints, and are kept while they hold."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import damage
from train_states import assert_same_bits, make_state

from experiments.training import averaging
from experiments.training.averaging import average_last
from experiments.training.checkpoint import Checkpoints


@pytest.mark.parametrize("num, steps", [(1, [3]), (2, [2, 3]), (9, [1, 2, 3])])
def test_average_is_the_mean_of_the_last_parameters(saved, num, steps):
  params = [make_state(step).params for step in steps]
  average, averaged = average_last(Checkpoints(saved), num, like=params[0], part=1.0)
  assert averaged == steps
  for found, *values in zip(*map(jax.tree.leaves, (average, *params)), strict=True):
    mean = np.mean(np.array(values, np.float64), axis=0)
    np.testing.assert_allclose(found, mean, rtol=1e-6, atol=1e-8)
  if num == 1:
    assert_same_bits(average, params[0])


def test_average_sums_in_float32(tmp_path):
  values = [1.0, 2.0**-8, 2.0**-8, 2.0**-8]  # in bfloat16 1 + 2**-8 is 1
  like = jnp.zeros(3, jnp.bfloat16)
  with Checkpoints(tmp_path) as checkpoints:
    for step, value in enumerate(values):
      checkpoints.save(step, dict(params=jnp.full_like(like, value)))
    average, _ = average_last(checkpoints, 4, like=like, part=1.0)
  np.testing.assert_array_equal(average, jnp.full_like(like, np.mean(values)))


@pytest.fixture
def average(copied, tmp_path):
  """Returns a function that averages two steps of a copy, and keeps what it finds."""
  options = dict(part=1.0, keep=tmp_path / "average.npz", like=make_state().params)
  return lambda: average_last(Checkpoints(copied), 2, **options)


def test_an_average_is_kept_and_read_without_the_checkpoints(copied, average):
  wanted, steps = average()
  for step in (1, 2, 3):
    shutil.rmtree(copied / str(step) / "state")
    shutil.rmtree(copied / str(step) / "manifest")
  found, again = average()
  assert_same_bits(found, wanted)
  assert again == steps == [2, 3]


def test_an_average_is_computed_again_if_a_step_was_saved_again(copied, average):
  average()
  shutil.rmtree(copied / "3")
  with Checkpoints(copied) as checkpoints:
    checkpoints.save(3, make_state(7))
  wanted, _ = average_last(Checkpoints(copied), 2, part=1.0, like=make_state().params)
  assert_same_bits(average()[0], wanted)


def test_no_damage_of_a_kept_average_is_read(tmp_path):
  file, params = tmp_path / "average.npz", make_state().params
  averaging.write_average(file, "a key", params, [2, 3])
  content = file.read_bytes()
  average, steps = averaging.read_average(file, "a key", params)
  assert_same_bits(average, params)
  assert steps == [2, 3]
  for place in range(0, len(content), 7):
    damaged = bytearray(content)
    damaged[place] ^= 1 << place % 8
    file.write_bytes(damaged)
    assert averaging.read_average(file, "a key", params) is None, place


def test_an_average_without_a_damaged_step_is_not_kept(copied, average, capsys):
  good = (copied / "3").with_name("good")
  shutil.copytree(copied / "3", good)
  damage(copied / "3")
  assert average()[1] == [1, 2]
  shutil.rmtree(copied / "3")
  good.rename(copied / "3")
  assert average()[1] == [2, 3]
  assert "passed over" in capsys.readouterr().err
