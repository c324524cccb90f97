"""Every relation, alone and in sums, is its formula in every implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import ANY_RELATION, compiled_results, results, set_tiles
from comparing import assert_close, assert_same
from formula import formula
from numpy.testing import assert_allclose
from random_calls import BY_DISTANCE, KINDS, RandomCall

from relpos_jax import DistanceBias, LinearBias
from relpos_jax.attention import lookup

pytestmark = pytest.mark.usefixtures("float64", "compile_anew")

SUMS = [
  ("positions", "labels", "distance"),
  ("labels", "labels"),
  ("key", "features", "content", "linear"),
  ("function", "positions", "numbers", "function"),
  ("positions", "key"),
  (*BY_DISTANCE, "linear"),
]
EACH = [(kind,) for kind in KINDS]


@pytest.fixture
def compile_anew():
  """Compiles again what a test has patched."""
  compiled_results.clear_cache()


# Laws 1 and 12.
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kinds", [*EACH, *SUMS], ids="+".join)
def test_every_relation_and_every_sum_is_its_formula(kinds, seed, monkeypatch):
  """Takes a sum in either order, and all heads at once or two at a time."""
  in_order = kinds if seed == 0 else kinds[::-1]
  random = RandomCall(in_order, seed)
  arrays, options = random.arrays, random.options
  set_tiles(monkeypatch, 4, 7, heads=2 if seed else None)
  wanted = results("reference", arrays, options)
  assert_allclose(wanted["output"], formula(arrays, options), rtol=0, atol=1e-10)
  names = ["chunked"]  # the others may be the reference
  if {*kinds} - {"linear", "function"}:
    names.append("projected")
  if {*kinds} & {"positions", "labels", "features"}:
    names.append("per_position")
  for name in names:
    assert_close(results(name, arrays, options), wanted, name)
  if {*kinds} <= {*BY_DISTANCE}:
    check_along_a_band(arrays, options, wanted, seed)


def check_along_a_band(arrays, options, wanted, seed):
  """Leaves positions out: queries are at 0, 1, 2, ... from an offset on."""
  on_band = dict(options)
  on_band.pop("query_positions", None)
  on_band.pop("key_positions", None)
  if seed:
    on_band |= {"dropout_rate": 0.3, "dropout_key": jax.random.key(0)}
  if on_band.keys() != options.keys():
    wanted = results("reference", arrays, on_band)
    assert_close(results("chunked", arrays, on_band), wanted, "chunked")
  assert_close(results("skew", arrays, on_band), wanted, "skew")


LOOKED_UP = "positions", "labels", "distance", "content", "key", "numbers"


@pytest.mark.parametrize("kind", LOOKED_UP)
def test_lookups_by_products_are_lookups(kind, monkeypatch):
  """Checks on a CPU what accelerators do."""
  random = RandomCall([kind], 0)
  wanted = results("reference", random.arrays, random.options)
  monkeypatch.setattr(lookup, "look_up", lookup.multiply)
  assert_close(results("projected", random.arrays, random.options), wanted)


@pytest.mark.parametrize("kinds", [("positions", "key"), ("function",)], ids="+".join)
def test_an_offset_as_large_as_distances_may_be(kinds, monkeypatch):
  """Compares float32, whose integers have 32 bits, with the definition in float64.

  Bounds logits: without the cap, numbers that all keys of a query share would cancel.
  """
  set_tiles(monkeypatch, 4, 7)
  random = RandomCall(kinds, 4)
  exact_arrays = random.arrays
  slopes = LinearBias(2.0**-32 * jnp.arange(1, 1 + random.heads))
  biases = DistanceBias(random.normal(12, random.heads), left=10), slopes
  exact_arrays["more"] += biases
  names = ["reference", "projected", "chunked"] + ["skew"] * ("key" in kinds)
  offsets = [(2**30, True)]
  for last in (2**31 - random.queries, random.keys - 2**31):
    offsets.append((jnp.int32(last), False))
  for offset, is_causal in offsets:
    options = {"query_offset": offset, "is_causal": is_causal, "logits_soft_cap": 5.0}
    exact_output = formula(exact_arrays, options)
    options["local_window_size"] = 2**31 - 1
    with jax.enable_x64(False):
      arrays = jax.tree.map(jnp.float32, exact_arrays)
      wanted = results("reference", arrays, options) | {"output": exact_output}
      for name in names:
        actual = results(name, arrays, options)
        errors = jax.tree.leaves(jax.tree.map(relative_error, actual, wanted))
        assert max(errors) < 1e-4, f"{name}, {options}"


def relative_error(x, wanted):
  return np.abs(x - wanted).max() / max(np.abs(wanted).max(), 1e-9)


# Law 20.
@pytest.mark.parametrize("name", ANY_RELATION)
def test_positions_across_the_largest_integer_change_no_bit(name, monkeypatch):
  """Traces 32-bit integers that wrap around: their differences do not."""
  set_tiles(monkeypatch, 4)
  random = RandomCall([*BY_DISTANCE, "function"], 6)
  queries = random.integers(-9, 9, random.batch, random.queries)
  keys = random.integers(-9, 9, random.batch, random.keys)

  def run(shift, dtype):
    positions = [jnp.asarray((x + shift).astype(dtype)) for x in (queries, keys)]
    options = dict(zip(("query_positions", "key_positions"), positions, strict=True))
    options |= {"is_causal": True, "local_window_size": (7, 2)}
    return results(name, random.arrays, options)

  wanted = run(0, np.int32)
  for shift in (2**31 + 1, 2 * 10**9):
    assert_same(run(shift, np.int32), wanted)
  for shift in (0, 2**31 + 1, 2 * 10**9):
    assert_same(run(shift, np.uint32), wanted)
