"""The decoder-only model: any relation by config. `tests/decoding` checks its cache."""

import jax
import numpy as np
import pytest
from comparing import assert_close
from compiling import compile_quickly, make_random
from flax import nnx

from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig

VOCABULARY = 13
TOKENS = np.random.default_rng(1).integers(1, VOCABULARY, (2, 9))
SMALL = {
  "num_layers": 2,
  "width": 16,
  "num_heads": 2,
  "feed_forward": 16,
  "max_distance": 3,
}
MUSIC_TRANSFORMER = {"positions": "both", "relative_values": False, "beyond": "zero"}


def make(**values):
  config = LanguageModelConfig(VOCABULARY, **SMALL | values)
  return make_random(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
  "values, knows_order",
  [
    (MUSIC_TRANSFORMER, True),
    ({"positions": "relative", "tables_per_head": False}, True),
    ({"positions": "sinusoidal", "norm": "post"}, True),
    ({"relative_keys": False}, True),
    ({"positions": "t5"}, True),
    ({"positions": "alibi"}, True),
    ({"positions": "none"}, False),
    ({"max_distance": 0}, False),
  ],
  ids=str,
)
def test_order_matters_where_there_are_positions(values, knows_order):
  """Reverses the tokens before the last one.

  Two layers would know the order without positions.
  """
  model = make(**values | {"num_layers": 1})
  reversed_tokens = np.concatenate([TOKENS[:, 7::-1], TOKENS[:, 8:]], axis=1)
  last = compile_quickly(lambda tokens: model(tokens)[:, -1])
  is_same = np.allclose(last(TOKENS), last(reversed_tokens), atol=1e-5)
  assert is_same != knows_order


def test_a_causal_model_needs_no_rows_on_the_right():
  symmetric, model = make(), make(left=3, max_distance=0)
  own = nnx.state(model)
  state = jax.tree.map(lambda x, like: x[: len(like)], nnx.state(symmetric), own)
  nnx.update(model, state)
  assert model.layers[0].self_attention.tables().key.shape == (4, 2, 8)
  logits = compile_quickly(lambda model, tokens: model(tokens))
  assert_close(logits(model, TOKENS), logits(symmetric, TOKENS), atol=1e-5)
