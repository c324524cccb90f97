"""The functions and a patch of results/adoption.md, in the layers that they change."""

import importlib.util
import pathlib
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alphagenome_attention import make_original
from compiling import with_gradients

from relpos_jax import RelativePositions, dot_product_attention

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


def test_haiku(page):
  haiku = pytest.importorskip("haiku")
  x = jax.random.normal(jax.random.key(1), (T, N, H))

  @haiku.without_apply_rng
  @haiku.transform
  def attend(x):
    relations = RelativePositions(*page["tables_in_haiku"](16, H))
    return dot_product_attention(x, x, x, relations=relations, is_causal=True)

  (name,) = attend.init(jax.random.key(0), x)

  def changed(tables):
    key, value = tables
    return attend.apply({name: dict(key=key, value=value)}, x)

  check(changed, dot_product_attention(x, x, x, is_causal=True))


def largest_error(values, truth):
  return jnp.abs(values - truth).max() / max(jnp.abs(truth).max(), 1e-2)


@pytest.mark.parametrize("dtype, most", [("float32", 1e-5), ("bfloat16", 0.05)])
def test_the_patch_of_alphagenome(dtype, most, tmp_path):
  original = pytest.importorskip("alphagenome_research.model.attention")
  patch = PAGE.parent / "adoption" / "alphagenome.patch"
  file = tmp_path / re.search(r"(?m)^\+\+\+ b/(.*)", patch.read_text())[1]
  file.parent.mkdir(parents=True)
  file.write_bytes(pathlib.Path(original.__file__).read_bytes())
  subprocess.run(["patch", "-p1", "-i", patch], cwd=tmp_path, check=True)
  spec = importlib.util.spec_from_file_location("patched", file)
  patched = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(patched)
  x = jax.random.normal(jax.random.key(0), (2, 64, 48), dtype)
  pairs = jax.random.normal(jax.random.key(1), (2, 4, 4, 24), dtype)

  transformed = make_original(original)
  params, state = transformed.init(jax.random.key(2), x, pairs)

  def results(module):
    def apply(params, x, pairs):
      return make_original(module).apply(params, state, x, pairs)[0]

    return with_gradients(apply, params, x, pairs)

  errors = jax.tree.map(largest_error, results(patched), results(original))
  assert max(jax.tree.leaves(errors)) < most
