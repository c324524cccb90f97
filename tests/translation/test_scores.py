"""Scores and samples keep every figure and word; attention panels show the model's weights."""

import jax
import numpy as np
import pytest
from flax import nnx

from relpos_jax import attention_weights
from relpos_jax.data.tokenizer import BOS, Tokenizers, encode, train_tokenizer
from relpos_jax.evaluation.bleu import Score, corpus_bleu, paper_bleu
from relpos_jax.models.layers import Memory
from relpos_jax.models.seq2seq import Transformer, TransformerConfig
from relpos_jax.translation.scores import BleuRow, attention_panels, bleu_table, sample_table

LONG = "Der alte Gärtner, der [sieben] rote Blumen gesehen hatte, ging ins Häuschen. " * 6
ROWS = [
  BleuRow("test", 1000, Score(36.624, "nrefs:1|tok:13a"), Score(37.0, "nrefs:1|tok:moses-de")),
  BleuRow("long", 267, Score(9.5, "nrefs:1|tok:13a"), Score(100.0, "nrefs:1|tok:moses-de")),
]
SOURCE, TARGET = "ein Mann schläft", "a man sleeps"
TOKENIZER = train_tokenizer([SOURCE, TARGET] * 2, "bpe", size=300)
TOKENIZERS = Tokenizers(TOKENIZER, TOKENIZER)


def test_the_table_has_every_score_and_each_signature_once():
  text = bleu_table(ROWS)
  lines = [line.split() for line in text.splitlines()]
  assert ["test", "1,000", "36.62", "37.00"] in lines
  assert ["long", "267", "9.50", "100.00"] in lines
  assert text.count("nrefs:1|tok:13a") == text.count("nrefs:1|tok:moses-de") == 1
  other = ROWS[1]._replace(sacrebleu=Score(1.0, "nrefs:1|tok:none"))
  text = bleu_table([ROWS[0], other])
  assert "sacreBLEU: nrefs:1|tok:13a" in text and "sacreBLEU: nrefs:1|tok:none" in text


def test_real_signatures_are_one_line_each():
  texts = ["Ein Hund schläft."], ["Der Hund schläft."]
  row = BleuRow("test", 1, corpus_bleu(*texts), paper_bleu(*texts, "de"))
  assert "sacreBLEU: " + row.sacrebleu.signature in bleu_table([row]).splitlines()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_long_sentences_wrap_beside_their_names(width):
  text = sample_table([("A [bold]short[/bold] one.", LONG, LONG)] * 5, width)
  lines = text.splitlines()
  assert max(map(len, lines)) <= width
  assert sum(line.startswith("translation  ") for line in lines) == 5
  assert all(line[:13].strip() in ("", "source", "reference", "translation") for line in lines)
  words = " ".join(line[13:].strip() for line in lines).split()
  assert words == ("A [bold]short[/bold] one. " + LONG + LONG).split() * 5


def test_samples_are_separated_by_an_empty_line(monkeypatch):
  monkeypatch.setenv("FORCE_COLOR", "1")
  assert sample_table([("a", "b", "c"), ("d", "e", "")]).split("\n\n") == [
    "source       a\nreference    b\ntranslation  c",
    "source       d\nreference    e\ntranslation",
  ]
  assert sample_table([]) == ""


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
  own, to_source = attention_panels(model, TOKENIZERS, SOURCE, TARGET)
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
      key, value = layer.cross_attention.keys_values(memory)
      query = layer.cross_attention.query(around_cross.before(y))
      weights.append(attention_weights(query, key).mean(axis=1)[0])
      x = layer(x, None, Memory(key, value, None), is_causal=True)
    return sum(weights) / 2

  target = np.concatenate([[BOS], encode(TOKENIZER, [TARGET])[0][:-1]])[None]
  np.testing.assert_allclose(to_source.weights, read_two_layers(source, target), atol=1e-5)


def test_white_space_around_a_sentence_is_nothing_as_in_translating(model):
  tokenizers = TOKENIZERS
  wanted = attention_panels(model, tokenizers, SOURCE, TARGET)
  for panel, other in zip(
    attention_panels(model, tokenizers, f" {SOURCE}\t", TARGET), wanted, strict=True
  ):
    assert panel.columns == other.columns
    np.testing.assert_array_equal(panel.weights, other.weights)


def test_looking_leaves_the_model_as_it_was(model):
  before = nnx.graphdef(model)
  attention_panels(model, TOKENIZERS, SOURCE, TARGET)
  assert nnx.graphdef(model) == before
