"""Rotary positions turn pairs of numbers."""

import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_close, assert_same
from numpy.testing import assert_array_equal

from relpos_jax import rotate

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(2, 5, 3, 10))
POSITIONS = RANDOM.integers(-9, 99, (2, 5))

pytestmark = pytest.mark.usefixtures("float64")


def turn(x, positions=POSITIONS, **options):
  return rotate(jnp.asarray(x), jnp.asarray(positions), **options)


def test_rotate_turns_the_part_that_has_frequencies():
  frequencies = RANDOM.normal(size=3)
  turned = X[..., :3] + 1j * X[..., 3:6]
  turned *= np.exp(1j * POSITIONS[..., None, None] * frequencies)
  wanted = np.concatenate([turned.real, turned.imag, X[..., 6:]], axis=-1)
  assert_close(turn(X, frequencies=jnp.asarray(frequencies)), wanted)


def test_the_base_gives_the_usual_frequencies():
  frequencies = 100.0 ** (-np.arange(5) / 5)
  by_base = turn(X, base=100.0)
  assert_close(turn(X, frequencies=jnp.asarray(frequencies)), by_base)
  assert_same(turn(X[1], POSITIONS[1], base=100.0), by_base[1])


def test_frequencies_of_zero_turn_nothing():
  assert_same(turn(X, frequencies=jnp.zeros(4)), X)


def test_bfloat16_is_turned_in_float32_and_rounded_once():
  small = jnp.asarray(X, jnp.bfloat16)
  turned = turn(small.astype(jnp.float32))
  wanted = turned.astype(jnp.bfloat16)
  assert_array_equal(turn(small), wanted, strict=True)
