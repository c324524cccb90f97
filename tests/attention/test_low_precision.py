"""Law 10: bfloat16 inputs cost relative attention little more accuracy than plain attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import fusing, quickly

from relpos_jax import ContentBias, LinearBias, RelativePositions, dot_product_attention
from relpos_jax.attention.choice import IMPLEMENTATIONS


@functools.cache
def _errors(seed, implementation=None, kind="tables"):
  """Computes the relative root-mean-square error of bfloat16 inputs, in output and gradients.

  A share, because the relative terms make the output larger, and its last rounding with it.
  """
  random = np.random.default_rng(seed).normal
  arrays = dict(zip("qkv", random(size=(3, 2, 48, 4, 32)), strict=True))
  if implementation and kind == "tables":
    arrays |= dict(zip(["key table", "value table"], random(size=(2, 17, 32)), strict=True))
  elif kind == "slopes":
    arrays["slopes"] = random(size=4)
  elif implementation:
    arrays |= {"content": random(size=(2, 48, 4, 8)), "content table": random(size=(17, 4, 8))}
  # Rounded first: the inputs' own rounding is nobody's error.
  arrays = {name: jnp.asarray(x, jnp.bfloat16) for name, x in arrays.items()}
  low = _low(arrays, implementation)
  with jax.enable_x64(True):
    high = _high({n: x.astype(jnp.float64) for n, x in arrays.items()}, implementation)
    return {name: _rms(low[name] - high[name]) / _rms(high[name]) for name in high}


def _rms(x):
  return np.sqrt(np.mean(np.asarray(x, np.float64) ** 2))


def _output_and_gradients(arrays, implementation):
  def run(arrays):
    relations, offset = None, 0
    if "key table" in arrays:
      relations = RelativePositions(arrays["key table"], arrays["value table"])
    elif "content" in arrays:
      relations = ContentBias(arrays["content"], arrays["content table"])
    elif "slopes" in arrays:  # queries far from all keys, whose distances are all large
      relations, offset = LinearBias(arrays["slopes"] / 16), 500
    options = dict(relations=relations, query_offset=offset, implementation=implementation)
    return dot_product_attention(*(arrays[name] for name in "qkv"), **options)

  output, pull_back = jax.vjp(run, arrays)
  cotangent = np.random.default_rng(7).normal(size=output.shape)
  cotangent = jnp.asarray(jnp.asarray(cotangent, jnp.bfloat16), output.dtype)
  return dict(output=output, **pull_back(cotangent)[0])


# What is rounded where is the compiler's choice too: which operations it fuses.
_low = fusing(_output_and_gradients, static_argnums=1)
_high = quickly(_output_and_gradients, static_argnums=1)


KINDS = ["tables", "content", "slopes"]
CALLS = [
  (name, kind)
  for name in IMPLEMENTATIONS
  for kind in KINDS
  if "pallas" not in name or kind == "tables"
]


@pytest.mark.parametrize("implementation, kind", CALLS)
def test_error_in_bfloat16(implementation, kind):
  """Allows tables, which plain attention lacks, the largest error of plain attention."""
  plain = [_errors(seed) for seed in range(2)]
  relative = [_errors(seed, implementation, kind) for seed in range(2)]
  for name in relative[0]:
    error = np.mean([errors[name] for errors in relative])
    wanted = np.mean([errors.get(name, max(errors.values())) for errors in plain])
    assert 0 < error <= 1.5 * wanted, name
