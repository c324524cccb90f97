"""Law 11: sharded over batch and heads the result is one device's, and nothing big moves."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from relpos_jax import RelativePositions, dot_product_attention
from relpos_jax.attention import chunked
from relpos_jax.attention.choice import IMPLEMENTATIONS
from relpos_jax.attention.inputs import gather_inputs

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Of the axes by letter; others have size 1.
SIZES = dict(B=8, T=24, S=24, N=4, K=2, H=16, R=9)
HEADS_TOO = dict(B="data", N="model", K="model")
BATCH_ALONE = dict(B=("data", "model"))


def check_eight_devices_equal_one(attend, axes, along, stays=True):
  """For `attend` of a dict of arrays with these axes.

  along: the mesh axes of a letter; stays: whether nothing may move.
  """
  random = np.random.default_rng(0).normal
  shape = lambda letters: [SIZES.get(letter, 1) for letter in letters]
  arrays = {name: jnp.asarray(random(size=shape(x)), jnp.float32) for name, x in axes.items()}

  def output_and_gradients(arrays):
    output, pull_back = jax.vjp(attend, arrays)
    return output, *pull_back(output)

  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  place = lambda letters: NamedSharding(mesh, PartitionSpec(*map(along.get, letters)))
  places = {name: place(letters) for name, letters in axes.items()}
  jit = functools.partial(jax.jit, output_and_gradients, compiler_options=QUICK)
  sharded = jit(in_shardings=(places,), out_shardings=(place("BTNH"), places))
  compiled = sharded.lower(arrays).compile()
  moves = "(all-gather|all-to-all|collective-permute)"
  assert not stays or not re.findall(rf"= .*? {moves}(?:-start)?\(", compiled.as_text())
  for one, eight in zip(
    jax.tree.leaves(jit()(arrays)),
    jax.tree.leaves(compiled(arrays)),
    strict=True,
  ):
    np.testing.assert_allclose(eight, one, rtol=1e-4, atol=1e-4)


def call(attention, arrays, **options):
  arrays = dict(arrays)
  relations = RelativePositions(arrays.pop("key_table"), arrays.pop("value_table"))
  return attention(**arrays, relations=relations, **options)


def in_blocks(*args, **options):
  return chunked.attention(gather_inputs(*args, **options), block=8)


@pytest.mark.parametrize("table", ["RH", "RNH"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_eight_devices_equal_one(implementation, table):
  axes = dict(query="BTNH", key="BSNH", value="BSNH", key_table=table, value_table=table)
  if table == "RH" and IMPLEMENTATIONS[implementation].device is None:  # the kernels take none
    axes |= dict(bias="1NTS")
  options = dict(is_causal=True, implementation=implementation)
  attend = lambda arrays: call(dot_product_attention, arrays, **options)
  check_eight_devices_equal_one(attend, axes, HEADS_TOO)


@pytest.mark.parametrize(
  "bias, heads, along",
  [(bias, heads, HEADS_TOO) for bias in ("BNTS", "1NTS", "11TS") for heads in "NK"]
  + [("11TS", "K", BATCH_ALONE)],
)
def test_each_device_has_its_part_of_a_bias(bias, heads, along):
  """By blocks; where key heads are fewer, some pairs are hidden and some dropped."""
  key = f"BS{heads}H"
  axes = dict(query="BTNH", key=key, value=key, bias=bias, key_table="RNH", value_table="RH")
  options = {}
  if heads == "K":
    mask = np.random.default_rng(1).random([SIZES[letter] for letter in "BNTS"]) < 0.8
    options = dict(mask=mask, dropout_rate=0.3, dropout_key=jax.random.key(0))
  attend = lambda arrays: call(in_blocks, arrays, **options)
  check_eight_devices_equal_one(attend, axes, along)


def test_a_sum_over_an_uneven_batch_counts_nothing_else():
  """Of six sequences the last of four devices would have two that are none."""
  axes = dict(query="BTNH", key="BSNH", value="BSNH", bias="11TS", key_table="RH", value_table="RH")

  def attend(arrays):
    six = {name: arrays[name][:6] for name in ("query", "key", "value")}
    output = call(in_blocks, arrays | six)
    return jnp.pad(output, ((0, 2), (0, 0), (0, 0), (0, 0)), constant_values=1)

  check_eight_devices_equal_one(attend, axes, HEADS_TOO, stays=False)
