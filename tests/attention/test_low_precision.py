"""Law 10: in bfloat16 relative attention is about as accurate as plain attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import ANY_DTYPE, call, output_and_gradients
from comparing import relative_errors
from compiling import compile_fusing, compile_quickly

from relpos_jax import ContentBias, LinearBias

SEEDS = range(2)


def make_arrays(seed, kind):
  random = np.random.default_rng(seed).normal
  query, key, value = random(size=(3, 2, 48, 4, 32))
  arrays = {"query": query, "key": key, "value": value}
  match kind:
    case "tables":
      arrays["k"], arrays["v"] = random(size=(2, 17, 32))
    case "content":
      content = random(size=(2, 48, 4, 8))
      arrays["more"] = (ContentBias(content, random(size=(17, 4, 8))),)
    case "slopes":
      arrays["more"] = (LinearBias(random(size=4) / 16),)
  # Rounded first: the inputs' own rounding is nobody's error.
  return jax.tree.map(jnp.bfloat16, arrays)


def run(arrays, offset, implementation):
  attend = functools.partial(call, query_offset=offset, implementation=implementation)
  return output_and_gradients(attend, arrays)


# What is rounded where is the compiler's choice too: which operations it fuses.
run_in_bfloat16 = compile_fusing(run, static_argnums=(1, 2))
run_in_float64 = compile_quickly(run, static_argnums=(1, 2))


@functools.cache
def errors(seed, implementation=None, kind="plain"):
  """Computes the error of bfloat16 inputs in output and gradients, a share of each.

  A share, because the relative terms make the output larger, and its last rounding with
  it.
  """
  arrays = make_arrays(seed, kind)
  # Linear biases: queries far from all keys, whose distances are all large.
  options = 500 if kind == "slopes" else 0, implementation
  actual = run_in_bfloat16(arrays, *options)
  with jax.enable_x64(True):
    exact_arrays = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
    return relative_errors(actual, run_in_float64(exact_arrays, *options))


CALLS = [(name, "tables") for name in ANY_DTYPE]
# "reference" computes them as these do.
CALLS += [("per_position", "content")]
for name in ("projected", "skew", "chunked"):
  CALLS += [(name, "content"), (name, "slopes")]


@pytest.mark.parametrize("implementation, kind", CALLS)
def test_error_in_bfloat16(implementation, kind):
  """Allows tables, which plain attention lacks, its largest error."""
  plain = [errors(seed) for seed in SEEDS]
  relative = [errors(seed, implementation, kind) for seed in SEEDS]
  for name in relative[0]:
    error = np.mean([x[name] for x in relative])
    allowed = np.mean([x.get(name, max(x.values())) for x in plain])
    assert 0 < error <= 1.5 * allowed, name
