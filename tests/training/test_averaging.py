"""Averages are means of the last good checkpoints, and are kept while they hold."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import damage
from test_checkpoint import assert_same_bits, make_state, save_three

from experiments.training.averaging import average_last
from experiments.training.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  return save_three(tmp_path_factory.mktemp("run") / "checkpoints")


@pytest.fixture
def copied(saved, tmp_path):
  return shutil.copytree(saved, tmp_path / "checkpoints")


@pytest.mark.parametrize(
  "num, steps", [(1, [3]), (2, [2, 3]), (3, [1, 2, 3]), (9, [1, 2, 3])]
)
def test_average_is_the_mean_of_the_last_parameters(saved, num, steps):
  params = [make_state(step).params for step in steps]
  average, averaged = average_last(Checkpoints(saved), num, like=params[0], part=1.0)
  assert averaged == steps
  assert jax.tree.structure(average) == jax.tree.structure(params[0])
  for name, array in average.items():
    values = np.array([x[name][...] for x in params], np.float64)
    np.testing.assert_allclose(array[...], values.mean(0), rtol=1e-6, atol=1e-8)
    assert array.dtype == jnp.float32
  if num == 1:
    assert_same_bits(average, params[0])


def test_average_sums_in_float32(tmp_path):
  values = [1.0, 2.0**-8, 2.0**-8, 2.0**-8]  # in bfloat16 1 + 2**-8 is 1
  with Checkpoints(tmp_path) as checkpoints:
    for step, value in enumerate(values):
      checkpoints.save(step, dict(params=jnp.full(3, value, jnp.bfloat16)))
    like = jnp.zeros(3, jnp.bfloat16)
    average, _ = average_last(checkpoints, 4, like=like, part=1.0)
  assert average.dtype == jnp.bfloat16
  np.testing.assert_array_equal(average, jnp.asarray(np.mean(values), jnp.bfloat16))


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


def flip_bit(folder):
  file = folder.with_name("average.npz")
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 4
  file.write_bytes(content)


def save_another_step(folder):
  with Checkpoints(folder) as checkpoints:
    checkpoints.save(4, make_state(4))


def save_other_values(folder):
  shutil.rmtree(folder / "3")
  with Checkpoints(folder) as checkpoints:
    checkpoints.save(3, make_state(7))


@pytest.mark.parametrize("change", [flip_bit, save_another_step, save_other_values])
def test_an_average_is_computed_again_where_what_is_kept_is_not_it(
  copied, average, change
):
  average()
  change(copied)
  wanted, _ = average_last(Checkpoints(copied), 2, part=1.0, like=make_state().params)
  assert_same_bits(average()[0], wanted)


def test_an_average_without_a_damaged_step_is_not_kept(copied, average, capsys):
  good = (copied / "3").with_name("good")
  shutil.copytree(copied / "3", good)
  damage(copied / "3")
  assert average()[1] == [1, 2]
  shutil.rmtree(copied / "3")
  good.rename(copied / "3")
  assert average()[1] == [2, 3]
  assert "passed over" in capsys.readouterr().err
