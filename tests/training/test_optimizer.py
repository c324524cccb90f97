"""The schedule against the paper's formula, and Adam against its definition."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from relpos_jax.training.step import adam, inverse_sqrt, paper_schedule


@pytest.mark.parametrize("d_model, warmup, rate", [(512, 4000, 1.0), (1024, 8000, 2.0)])
def test_paper_schedule_is_the_formula_of_the_paper(d_model, warmup, rate):
  schedule = paper_schedule(d_model, warmup, rate)
  for t in (1, 2, warmup // 2, warmup - 1, warmup, warmup + 1, 4 * warmup, 100_000):
    wanted = rate * d_model**-0.5 * min(t**-0.5, t * warmup**-1.5)
    np.testing.assert_allclose(schedule(t - 1), wanted, rtol=1e-6)


def test_inverse_sqrt_peaks_at_warmup_and_halves_at_four_times_warmup():
  rates = np.array(inverse_sqrt(0.005, 2000)(np.arange(8000)))
  assert rates.argmax() == 2000 - 1
  np.testing.assert_allclose(rates[[999, 1999, 7999]], [0.0025, 0.005, 0.0025], rtol=1e-6)
  np.testing.assert_allclose(np.diff(rates[:2000]), 0.005 / 2000, rtol=1e-2)


def test_adam_is_its_definition_with_the_constants_of_the_paper():
  schedule = inverse_sqrt(0.05, 3)
  optimizer = adam(schedule)
  params = jnp.array([1.0, -2.0, 1e-7])
  state = optimizer.init(params)
  wanted, first, second = np.array(params, np.float64), np.zeros(3), np.zeros(3)
  for t in range(1, 8):
    gradient = np.cos(t * np.arange(1, 4)) * [1.0, 1e-3, 1e-9]
    updates, state = optimizer.update(jnp.asarray(gradient, jnp.float32), state)
    params = optax.apply_updates(params, updates)
    first = 0.9 * first + (1 - 0.9) * gradient
    second = 0.98 * second + (1 - 0.98) * gradient**2
    step = first / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.98**t)) + 1e-9)
    wanted -= float(schedule(t - 1)) * step
  np.testing.assert_allclose(params, wanted, rtol=1e-4, atol=1e-6)
