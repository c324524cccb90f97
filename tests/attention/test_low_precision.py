"""Law 10: bfloat16 inputs cost relative attention little more accuracy than plain attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import RelativePositions, dot_product_attention
from relpos_jax.attention.choice import IMPLEMENTATIONS


def _errors(seed, **options):
  """Of output and gradients: what bfloat16 inputs change, in root mean squares, as a share.

  A share, because the relative terms make the output larger, and its last rounding with it.
  """
  random = np.random.default_rng(seed).normal
  arrays = dict(zip("qkv", random(size=(3, 2, 48, 4, 32)), strict=True))
  if options:
    arrays |= dict(zip(["key table", "value table"], random(size=(2, 17, 32)), strict=True))
  # Rounded first: the inputs' own rounding is nobody's error.
  arrays = {name: jnp.asarray(x, jnp.bfloat16) for name, x in arrays.items()}
  low = _output_and_gradients(arrays, options)
  with jax.enable_x64(True):
    high = _output_and_gradients({n: x.astype(jnp.float64) for n, x in arrays.items()}, options)
    rms = lambda x: float(jnp.sqrt(jnp.mean(x.astype(jnp.float64) ** 2)))
    return {name: rms(low[name] - high[name]) / rms(high[name]) for name in high}


def _output_and_gradients(arrays, options):
  @jax.jit
  def output_and_gradients(arrays):
    output, pull_back = jax.vjp(run, arrays)
    cotangent = np.random.default_rng(7).normal(size=output.shape)
    cotangent = jnp.asarray(jnp.asarray(cotangent, jnp.bfloat16), output.dtype)
    return dict(output=output, **pull_back(cotangent)[0])

  def run(arrays):
    tables = [arrays[name] for name in ("key table", "value table") if name in arrays]
    relations = RelativePositions(*tables) if tables else None
    return dot_product_attention(*(arrays[n] for n in "qkv"), relations=relations, **options)

  return output_and_gradients(arrays)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_error_in_bfloat16(implementation):
  """The tables have no twin in plain attention: they may err as much as anything there."""
  plain = [_errors(seed) for seed in range(2)]
  relative = [_errors(seed, implementation=implementation) for seed in range(2)]
  for name in relative[0]:
    error = np.mean([errors[name] for errors in relative])
    wanted = np.mean([errors.get(name, max(errors.values())) for errors in plain])
    assert 0 < error <= 1.5 * wanted, name
