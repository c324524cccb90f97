"""The decoder-only model: any relation by config. `tests/decoding` checks its cache."""

import jax
import numpy as np
import pytest
from compiling import quickly, randomly
from flax import nnx

from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig

VOCABULARY = 13
KINDS = {
  "Music Transformer": dict(positions="both", relative_values=False, beyond="zero"),
  "clipped": dict(positions="relative", tables_per_head=False),
  "sinusoidal": dict(positions="sinusoidal", norm="post"),
  "values only": dict(relative_keys=False),
  "none": dict(positions="none"),
  "no distance": dict(max_distance=0),
  **{
    name: dict(positions=name)
    for name in ("t5", "alibi", "rotary", "xl", "content", "deberta")
  },
}


def make(**values):
  layers = (
    dict(num_layers=2, width=16, num_heads=2, feed_forward=16, max_distance=3) | values
  )
  config = LanguageModelConfig(VOCABULARY, **layers)
  return randomly(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))


TOKENS = np.random.default_rng(1).integers(1, VOCABULARY, (2, 9))


@pytest.mark.parametrize("kind", KINDS)
def test_order_matters_where_there_are_positions(kind):
  """Reverses the tokens before the last one. Two layers would see order without positions."""
  swapped = np.concatenate([TOKENS[:, 7::-1], TOKENS[:, 8:]], axis=1)
  model = make(**KINDS[kind] | dict(num_layers=1))
  last = quickly(lambda x: model(x)[:, -1])
  assert np.allclose(last(TOKENS), last(swapped), atol=1e-5) == (
    kind in ("none", "no distance")
  )


def test_a_causal_model_needs_no_rows_on_the_right():
  symmetric, model = make(), make(left=3, max_distance=0)
  state = jax.tree.map(
    lambda x, like: x[: len(like)], nnx.state(symmetric), nnx.state(model)
  )
  nnx.update(model, state)
  assert model.layers[0].self_attention.tables().key.shape == (4, 2, 8)
  logits = quickly(lambda model, tokens: model(tokens))
  np.testing.assert_allclose(
    logits(model, TOKENS), logits(symmetric, TOKENS), rtol=0, atol=1e-5
  )
