"""The distance tables' shapes and initial ranges, and the sinusoids' formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax.nn.positions import Positions, RelativePositionTables, sinusoids


@pytest.mark.parametrize(
  "max_distance, num_heads, shape, limit",
  [(16, 8, (33, 8, 64), 0.105), (8, None, (17, 64), 0.272)],
  ids=["base", "big"],
)
def test_tables_have_the_shape_and_range_of_the_original(
  max_distance, num_heads, shape, limit
):
  tables = RelativePositionTables(
    max_distance, 64, num_heads=num_heads, rngs=nnx.Rngs(0)
  )
  relation = tables()
  for table in (relation.key, relation.value):
    assert table.shape == shape
    assert 0.99 * limit < np.abs(table).max() < 1.001 * limit
    assert np.std(table) == pytest.approx(limit / 3**0.5, rel=0.05)
  assert not np.allclose(relation.key, relation.value)


def test_asymmetric_tables_of_any_start_dtype_and_names():
  zeros = nnx.with_partitioning(jax.nn.initializers.zeros, (None, "heads", None))
  options = {"num_heads": 2, "param_dtype": jnp.bfloat16, "table_init": zeros}
  with jax.set_mesh(jax.make_mesh((1,), ("heads",), (jax.sharding.AxisType.Auto,))):
    tables = RelativePositionTables(0, 4, left=7, **options, rngs=nnx.Rngs(0))
  assert tables.key.dtype == jnp.bfloat16
  assert "heads" in tables.key.get_metadata("out_sharding")
  relation = tables()
  assert relation.reach == (7, 0)
  assert relation.key.shape == (8, 2, 4)
  assert not relation.key.any()


def tensor2tensor_signal(length: int, channels: int) -> np.ndarray:
  """Computes `get_timing_signal_1d` of Tensor2Tensor term by term."""
  num_timescales = channels // 2
  increment = np.log(1.0e4 / 1.0) / (num_timescales - 1)
  inverse_timescales = np.exp(np.arange(num_timescales) * -increment)
  scaled_time = np.arange(length)[:, None] * inverse_timescales[None, :]
  return np.concatenate([np.sin(scaled_time), np.cos(scaled_time)], axis=1)


@pytest.mark.parametrize(
  "positions", [np.arange(100), np.array([[3, 1, 4], [1, 5, 9]])], ids=["line", "rows"]
)
def test_sinusoids_are_those_of_tensor2tensor_at_any_positions(positions):
  wanted = tensor2tensor_signal(100, 64)[positions]
  waves = sinusoids(jnp.asarray(positions), 64)
  np.testing.assert_allclose(waves, wanted, atol=1e-5)


def test_an_odd_width_has_no_sinusoids():
  with pytest.raises(ValueError, match="width is 5"):
    sinusoids(jnp.arange(3), 5)


def test_positions_without_a_relation_are_refused():
  class Forgetful(Positions):
    def __call__(self):
      pass

  query = jnp.zeros((3, 2, 4))
  with pytest.raises(ValueError, match=r"Forgetful\.__call__ returns None"):
    Forgetful().arguments(query, query)
  with pytest.raises(NotImplementedError, match="define `__call__`, or `arguments`"):
    Positions().arguments(query, query)
