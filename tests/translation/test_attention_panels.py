"""Panels of attention: the weights that the model computes with, and the words they are of."""

import jax
import numpy as np
import pytest
from flax import nnx

from relpos_jax import attention_weights
from relpos_jax.data.tokenizer import BOS, Tokenizers, encode, train_tokenizer
from relpos_jax.models.seq2seq import Transformer, TransformerConfig
from relpos_jax.translation.attention_panels import attention_panels

SOURCE, TARGET = "ein Mann schläft", "a man sleeps"
TOKENIZER = train_tokenizer([SOURCE, TARGET] * 2, "bpe", size=300)


@pytest.fixture(scope="module")
def model():
  size = TOKENIZER.get_vocab_size()
  config = TransformerConfig(
    size, size, num_layers=2, width=16, num_heads=2, feed_forward=32, max_distance=2
  )
  make = lambda: Transformer(config, rngs=nnx.Rngs(0))
  graphdef = nnx.graphdef(nnx.eval_shape(make))
  return nnx.merge(graphdef, jax.jit(lambda: nnx.state(make()))())


def test_panels_show_the_models_own_weights_with_the_words_they_are_of(model):
  own, to_source = attention_panels(model, Tokenizers(TOKENIZER, TOKENIZER), SOURCE, TARGET)
  assert own.columns == own.rows == to_source.columns == ["▁ein", "▁Mann", "▁schläft", "</s>"]
  assert to_source.rows == ["▁a", "▁man", "▁sleeps", "</s>"]
  for panel in (own, to_source):
    np.testing.assert_allclose(panel.weights.sum(axis=1), 1, atol=1e-5)

  @jax.jit
  def first_layer(source):
    layer = model.encoder.layers[0]
    x = layer.residuals[0].before(model.source_embedding(source))
    attention = layer.self_attention
    return attention_weights(
      attention.query(x), attention.key(x), relations=attention.tables()
    ).mean(axis=1)[0]

  source = encode(TOKENIZER, [SOURCE])[0][None]
  np.testing.assert_allclose(own.weights, first_layer(source), atol=1e-5)

  @jax.jit
  def read_two_layers(source, target):
    layers = model.decoder.layers
    x, memory = model.target_embedding(target), model.encode(source)
    weights = []
    for layer in layers:
      around, around_cross, _ = layer.residuals
      y = around.after(x, layer.self_attention(around.before(x), is_causal=True))
      key, _ = layer.cross_attention.keys_values(memory)
      query = layer.cross_attention.query(around_cross.before(y))
      weights.append(attention_weights(query, key).mean(axis=1)[0])
      x = layer(x, memory, None)
    return sum(weights) / 2

  target = np.concatenate([[BOS], encode(TOKENIZER, [TARGET])[0][:-1]])[None]
  np.testing.assert_allclose(to_source.weights, read_two_layers(source, target), atol=1e-5)


def test_white_space_around_a_sentence_is_nothing_as_in_translating(model):
  tokenizers = Tokenizers(TOKENIZER, TOKENIZER)
  wanted = attention_panels(model, tokenizers, SOURCE, TARGET)
  for panel, other in zip(
    attention_panels(model, tokenizers, f" {SOURCE}\t", TARGET), wanted, strict=True
  ):
    assert panel.columns == other.columns
    np.testing.assert_array_equal(panel.weights, other.weights)


def test_looking_leaves_the_model_as_it_was(model):
  before = nnx.graphdef(model)
  attention_panels(model, Tokenizers(TOKENIZER, TOKENIZER), SOURCE, TARGET)
  assert nnx.graphdef(model) == before
