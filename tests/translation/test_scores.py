"""Scores, samples and files have words; panels show the model's own weights."""

import functools
import pathlib
from unittest import mock

import jax
import numpy as np
import pytest
import sacrebleu
from compiling import make_random
from flax import nnx

from configs import default, multi30k
from experiments.data.tokenizer import encode, train_tokenizer
from experiments.evaluation.bleu import paper_bleu
from experiments.training.run import Run
from experiments.translation import scores
from experiments.translation.corpus import Corpus
from experiments.translation.data import learn_tokenizer
from relpos_jax import attention_weights
from relpos_jax.models.seq2seq import Transformer, TransformerConfig

PAIRS = [
  ("a man li@@ kes &apos; a dog", "ein mann m@@ ag &apos; ein@@ en hund"),
  ("no", "nein"),
  ("he st@@ a@@ res at something", "er st@@ ar@@ rt etwas an hier ."),
]
SUBWORDS = [
  "ein mann m@@ ag &apos; ein@@ e kat@@ ze",
  "n@@ ein",
  "er st@@ ar@@ rt etwas an@@",
]
WORDS = ["ein mann mag &apos; eine katze", "nein", "er starrt etwas an"]
REFERENCES = ["ein mann mag &apos; einen hund", "nein", "er starrt etwas an hier ."]


@pytest.fixture
def run(monkeypatch) -> Run:
  """Makes a run without a model, with fixed translations."""
  config = multi30k.get_config("prepared")
  monkeypatch.setattr(scores, "make_translator", lambda *_, **__: lambda *_: SUBWORDS)
  tokenizer = learn_tokenizer(config, Corpus(dict(train=PAIRS)))
  return Run(config, tokenizer, None, None, None)


def test_results_and_samples_are_of_words_and_attention_of_subwords(
  run, tmp_path, monkeypatch
):
  draw = mock.Mock(return_value=tmp_path / "attention.png")
  monkeypatch.setattr(scores, "draw_attention", draw)
  data = Corpus(dict(test=PAIRS), skipped=dict(test=(0, 2, 5)))

  found = scores.evaluate(run, scores.translate_tests(run, data), tmp_path)

  assert "@@" not in found.text
  assert all(line in found.text for line in (*WORDS, *REFERENCES, "he stares at"))
  written = (tmp_path / "test.translations.txt").read_text("utf-8")
  # A line for each pair.
  assert written.splitlines() == ["", WORDS[0], "", *WORDS[1:], ""]
  bleu = sacrebleu.corpus_bleu(WORDS, [REFERENCES], tokenize="none", force=True)
  assert found.scores["test"]["sacrebleu"] == pytest.approx(bleu.score)
  # Moses would tokenise its own &apos; again.
  paper = paper_bleu(WORDS, REFERENCES, "de", tokenized=True)
  assert found.scores["test"]["paper_bleu"] == paper.value
  assert paper_bleu(WORDS, REFERENCES, "de") != paper
  rows = found.sentences["test"]  # lengths in subwords, tokens of words, exact or not
  assert [(x[0], x[1], x[2], x[-1]) for x in rows] == [
    (8, 6, 6, 0),
    (1, 1, 1, 1),
    (8, 4, 6, 0),
  ]
  _, source, translation, *_ = draw.call_args[0]
  assert (source, translation) == (PAIRS[0][0], SUBWORDS[0])


def test_scores_and_samples_during_training_are_of_words(run):
  values, shown = scores.make_score(run, Corpus(dict(valid=PAIRS)))(None)
  chrf = sacrebleu.corpus_chrf(WORDS, [REFERENCES]).score
  assert values.keys() == {"valid_bleu", "valid_chrf", "valid_exact"}
  assert values["valid_chrf"] == chrf
  assert values["valid_exact"] == pytest.approx(100 / 3)
  assert "@@" not in shown
  assert all(line in shown for line in (*WORDS, *REFERENCES))


@pytest.fixture
def limits(monkeypatch):
  """Fixes the translations; returns whether ends are given, and the limits, by call."""
  limits = []

  def make_translator(run, beam_size=4, never_ends=False, **_):
    def translate(lines, params=None, at_most=None):
      limits.append((never_ends, None if at_most is None else at_most.tolist()))
      return ["ein", "nein", "er"][: len(lines)]

    return translate

  monkeypatch.setattr(scores, "make_translator", make_translator)
  return limits


DATA = Corpus(dict(valid=PAIRS, test=PAIRS, long=PAIRS))


def test_test_sets_are_scored_during_training_if_asked(run, limits):
  run.config.batches.max_length = 2  # tokens of the second pair, with their ends
  values, _ = scores.make_score(run, DATA)(None)
  assert not any(name.startswith("test") for name in values)
  run.config.training.update(score_tests=True, num_samples=2)
  values, shown = scores.make_score(run, DATA)(None)
  assert {name.partition("_")[0] for name in values} == {"valid", "test", "long"}
  # "nein" is no longer one.
  assert (values["valid_exact"], values["test_exact"]) == (0.0, 0.0)
  assert shown.startswith("source       no\n")


def test_test_sets_are_scored_with_lengths_given_if_asked(
  run, limits, tmp_path, monkeypatch
):
  monkeypatch.setattr(scores, "draw_attention", mock.Mock())
  found = scores.evaluate(run, scores.translate_tests(run, DATA), tmp_path)
  assert [*found.scores] == ["test", "long"]
  free = False, None
  assert limits == 2 * [free]

  run.config.evaluation.given_lengths = True
  limits.clear()
  found = scores.evaluate(run, scores.translate_tests(run, DATA), tmp_path)

  names = ["test", "long", "test_given", "long_given"]
  assert [*found.scores] == [*found.sentences] == names
  given = True, [len(target.split()) for _, target in PAIRS]
  assert limits == [free, free, given, given]


@pytest.mark.parametrize("lowercase, exact", [(False, 25.0), (True, 75.0)])
def test_single_words_have_scores_too(lowercase, exact):
  config = default.get_config()
  config.evaluation.lowercase = lowercase
  references = ["Hund", "Katze", "Maus", "ein  Tier"]
  lines = ["hund", "katze", "Haus", "ein Tier"]
  found, _ = scores.score_lines(config, lines, references)
  assert found["exact"].value == exact
  assert found["sacrebleu"].value < 50 < found["chrf"].value


def encoder_weights(model, source):
  """Returns the weights of the encoder's first layer, averaged over heads."""
  layer = model.encoder.layers[0]
  x = layer.residuals[0].before(model.source_embedding(source))
  attention = layer.self_attention
  query, key, relations = attention.query(x), attention.key(x), attention.tables()
  return attention_weights(query, key, relations=relations).mean(axis=1)[0]


def test_panels_show_the_models_own_weights_with_the_words_they_are_of(monkeypatch):
  source_text, target_text = "ein Mann schläft", "a man sleeps"
  tokenizer = train_tokenizer([source_text, target_text] * 2, "bpe", size=300)
  size = tokenizer.get_vocab_size()
  options = dict(num_layers=2, width=16, num_heads=2, feed_forward=32, max_distance=2)
  config = TransformerConfig(size, size, **options)
  model = make_random(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  run = Run(None, tokenizer, None, *nnx.split(model))
  monkeypatch.setattr(scores, "attention_heatmap", lambda panels, _: panels)

  own, to_source = scores.draw_attention(
    run, f" {source_text}\t", target_text, pathlib.Path()
  )

  words = ["▁ein", "▁Mann", "▁schläft", "</s>"]
  assert own.columns == own.rows == to_source.columns == words
  assert to_source.rows == ["▁a", "▁man", "▁sleeps", "</s>"]
  source = encode(tokenizer, [source_text])[0][None]
  wanted = jax.jit(functools.partial(encoder_weights, model))(source)
  np.testing.assert_allclose(own.weights, wanted, atol=1e-5)
  np.testing.assert_allclose(to_source.weights.sum(axis=1), 1, atol=1e-5)
