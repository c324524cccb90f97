"""The decoder-only model: causal, its cache exact, and any relation by config."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quickly
from flax import nnx

from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig

VOCABULARY = 13
KINDS = {
  "Music Transformer": dict(positions="both", relative_values=False, beyond="zero"),
  "clipped": dict(positions="relative", tables_per_head=False),
  "sinusoidal": dict(positions="sinusoidal", norm="post"),
  "none": dict(positions="none"),
}


def make(**values):
  layers = dict(num_layers=2, width=16, num_heads=2, feed_forward=16, max_distance=3) | values
  config = LanguageModelConfig(VOCABULARY, **layers)
  graphdef, shapes = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))
  generator = np.random.default_rng(0)
  fill = lambda leaf: jnp.asarray(0.5 * generator.standard_normal(leaf.shape), leaf.dtype)
  return graphdef, jax.tree.map(fill, shapes)


def tokens(length: int = 9) -> np.ndarray:
  return np.random.default_rng(1).integers(1, VOCABULARY, (2, length))


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_with_a_cache_gives_the_logits_of_the_full_pass(kind):
  """Reads five tokens with padding among them, then the others one by one."""
  graphdef, params = make(**KINDS[kind])
  whole = quickly(lambda params, x: nnx.merge(graphdef, params)(x))(params, tokens())
  decode = quickly(lambda params, x, cache: nnx.merge(graphdef, params).decode(x, cache))
  cache = nnx.merge(graphdef, params).init_cache(2, num_slots=14)
  first = np.insert(tokens()[:, :5], 2, 0, axis=1)
  logits, cache = decode(params, first, cache)
  parts = [np.delete(logits, 2, axis=1)]
  for column in tokens()[:, 5:].T:
    logits, cache = decode(params, column[:, None], cache)
    parts.append(logits)
  np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-4, atol=1e-4)


def test_order_matters_where_there_are_positions():
  """Reverses the tokens before the last one. Two layers would see order without positions."""
  swapped = np.concatenate([tokens()[:, 7::-1], tokens()[:, 8:]], axis=1)
  for kind, values in KINDS.items():
    graphdef, params = make(**values | dict(num_layers=1))
    last = quickly(lambda params, x, graphdef=graphdef: nnx.merge(graphdef, params)(x)[:, -1])
    same = np.allclose(last(params, tokens()), last(params, swapped), atol=1e-5)
    assert same == (kind == "none")


def test_music_transformers_tables_are_of_keys_alone_and_of_each_head():
  _, params = make(**KINDS["Music Transformer"])
  tables = {
    jax.tree_util.keystr(path): leaf.shape
    for path, leaf in jax.tree.flatten_with_path(params)[0]
    if "tables" in jax.tree_util.keystr(path)
  }
  assert [*tables.values()] == [(7, 2, 8)] * 2 and all("'key'" in path for path in tables)
