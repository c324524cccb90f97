"""Law 10: bfloat16 inputs cost relative attention little more accuracy than plain attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import fusing, quickly
from kernel_calls import call, errors, output_and_gradients

from relpos_jax import ContentBias, LinearBias
from relpos_jax.attention.choice import IMPLEMENTATIONS


@functools.cache
def errors_of(seed, implementation=None, kind="plain"):
  """Computes the relative root-mean-square error of bfloat16 inputs, in output and
  gradients.

  A share, because the relative terms make the output larger, and its last rounding with
  it.
  """
  random = np.random.default_rng(seed).normal
  arrays = dict(
    zip(("query", "key", "value"), random(size=(3, 2, 48, 4, 32)), strict=True)
  )
  offset = 0
  if kind == "tables":
    arrays |= dict(zip("kv", random(size=(2, 17, 32)), strict=True))
  elif kind == "content":
    arrays["more"] = (ContentBias(random(size=(2, 48, 4, 8)), random(size=(17, 4, 8))),)
  elif kind == "slopes":  # queries far from all keys, whose distances are all large
    arrays["more"], offset = (LinearBias(random(size=4) / 16),), 500
  # Rounded first: the inputs' own rounding is nobody's error.
  arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), arrays)
  low = _low(arrays, offset, implementation)
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
    return errors(low, _high(wide, offset, implementation))


def _output_and_gradients(arrays, offset, implementation):
  attend = functools.partial(call, query_offset=offset, implementation=implementation)
  return output_and_gradients(attend, arrays)


# What is rounded where is the compiler's choice too: which operations it fuses.
_low = fusing(_output_and_gradients, static_argnums=(1, 2))
_high = quickly(_output_and_gradients, static_argnums=(1, 2))


CALLS = [(name, "tables") for name in IMPLEMENTATIONS]
for name in IMPLEMENTATIONS:
  CALLS += [(name, kind) for kind in ("content", "slopes") if "pallas" not in name]


@pytest.mark.parametrize("implementation, kind", CALLS)
def test_error_in_bfloat16(implementation, kind):
  """Allows tables, which plain attention lacks, the largest error of plain attention."""
  plain = [errors_of(seed) for seed in range(2)]
  relative = [errors_of(seed, implementation, kind) for seed in range(2)]
  for name in relative[0]:
    error = np.mean([errors[name] for errors in relative])
    wanted = np.mean([errors.get(name, max(errors.values())) for errors in plain])
    assert 0 < error <= 1.5 * wanted, name
