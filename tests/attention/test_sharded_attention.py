"""Law 11: sharded over batch and heads the result is one device's, and nothing big moves."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from relpos_jax import RelativePositions, dot_product_attention
from relpos_jax.attention.choice import IMPLEMENTATIONS

BATCH, LENGTH, HEADS, WIDTH, K = 8, 24, 4, 16, 4


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_eight_devices_equal_one(implementation, per_head):
  random = np.random.default_rng(0).normal
  arrays = [jnp.asarray(random(size=(BATCH, LENGTH, HEADS, WIDTH)), jnp.float32) for _ in range(3)]
  table = (2 * K + 1, *([HEADS] if per_head else []), WIDTH)
  relations = RelativePositions(*(jnp.asarray(random(size=table), jnp.float32) for _ in range(2)))

  def loss(arrays, relations):
    options = dict(relations=relations, is_causal=True, implementation=implementation)
    return (dot_product_attention(*arrays, **options) ** 2).sum()

  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  over_batch_and_heads = NamedSharding(mesh, PartitionSpec("data", None, "model"))
  over_heads = NamedSharding(mesh, PartitionSpec(None, "model") if per_head else PartitionSpec())
  shardings = [over_batch_and_heads] * 3, jax.tree.map(lambda _: over_heads, relations)
  gradient = jax.grad(loss, argnums=(0, 1))
  sharded = jax.jit(gradient, in_shardings=shardings, out_shardings=shardings)

  compiled = sharded.lower(arrays, relations).compile()
  moves = re.findall(r"= .*? (all-gather|all-to-all|collective-permute)\(", compiled.as_text())
  assert not moves
  for one, eight in zip(
    jax.tree.leaves(jax.jit(gradient)(arrays, relations)),
    jax.tree.leaves(compiled(arrays, relations)),
    strict=True,
  ):
    np.testing.assert_allclose(eight, one, rtol=1e-4, atol=1e-4)
