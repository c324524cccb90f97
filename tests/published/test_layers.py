"""The functions of results/adoption.md for equinox and haliax are those layers."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.published

PAGE = pathlib.Path(__file__).parents[2] / "results" / "adoption.md"
B, T, N, H = 2, 24, 4, 8
TABLES = jax.random.normal(jax.random.key(0), (2, 33, H))


@pytest.fixture(scope="module")
def page():
  names = {}
  exec(
    re.search(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.M)[1],
    names,
  )
  return names


def check(changed, original):
  """Tables of zeros change nothing, and each of the others changes the output."""
  np.testing.assert_allclose(changed(0 * TABLES), original, atol=1e-5)
  of_keys, of_values = jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0])
  for chosen in (of_keys, of_values):
    assert jnp.abs(changed(TABLES * chosen[:, None, None]) - original).max() > 0.1


def test_equinox(page):
  equinox = pytest.importorskip("equinox")
  layer = equinox.nn.MultiheadAttention(N, N * H, key=jax.random.key(1))
  x = jax.random.normal(jax.random.key(2), (T, N * H))
  original = layer(x, x, x, mask=jnp.tril(jnp.ones((T, T), bool)))
  check(lambda tables: page["attend_in_equinox"](layer, x, tables), original)


@pytest.mark.filterwarnings("ignore:.*is_constant_dim:DeprecationWarning")
def test_haliax(page):
  haliax = pytest.importorskip("haliax")
  x = jax.random.normal(jax.random.key(1), (3, B, T, N, H))
  q, k, v = (haliax.named(of, ("Batch", "Pos", "Heads", "HeadSize")) for of in x)
  keys, values = (y.rename(dict(Pos="KPos")) for y in (k, v))
  attention = haliax.nn.attention
  mask = attention.causal_mask(q.resolve_axis("Pos"), keys.resolve_axis("KPos"))
  z = attention.dot_product_attention("KPos", "HeadSize", q, keys, values, mask)

  def changed(tables):
    return page["attend_in_haliax"](q, k, v, tables).array

  check(changed, z.rearrange(q.axes).array)
