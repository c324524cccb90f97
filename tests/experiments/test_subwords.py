"""Text in marked subwords: the model sees them; people, files and scores see words."""

import json
import types
from unittest import mock

import pytest

from configs import multi30k
from experiments import evaluate as evaluate_module
from experiments import train as train_module
from experiments import translate as translate_module
from experiments.run import Run, learn_tokenizers
from relpos_jax.data.corpus import Corpus
from relpos_jax.evaluation.bleu import corpus_bleu, paper_bleu, sentence_statistics

PAIRS = [
  ("a man li@@ kes &apos; a dog", "ein mann m@@ ag &apos; ein@@ en hund"),
  ("no", "nein"),
  ("he st@@ a@@ res at something", "er st@@ ar@@ rt etwas an hier ."),
]
SUBWORDS = ["ein mann m@@ ag &apos; ein@@ e kat@@ ze", "n@@ ein", "er st@@ ar@@ rt etwas an@@"]
WORDS = ["ein mann mag &apos; eine katze", "nein", "er starrt etwas an"]
REFERENCES = ["ein mann mag &apos; einen hund", "nein", "er starrt etwas an hier ."]


@pytest.fixture
def run(monkeypatch) -> Run:
  """A run whose model is none, and translates as it is told to."""
  config = multi30k.get_config("prepared")
  tokenizers = learn_tokenizers(config, Corpus(dict(train=PAIRS)))
  for module in (evaluate_module, train_module, translate_module):
    monkeypatch.setattr(module, "make_translator", lambda *_, **__: lambda *_: SUBWORDS)
  return Run(config, tokenizers, None, None, None)


def test_results_and_samples_are_of_words_and_attention_of_subwords(
  run, tmp_path, monkeypatch, capsys
):
  draw, write = mock.Mock(return_value="attention.png"), mock.Mock()
  monkeypatch.setattr(evaluate_module, "draw_attention", draw)
  monkeypatch.setattr(evaluate_module, "_write_record", write)
  monkeypatch.setattr(evaluate_module, "learning_curves", lambda *_: "curves.png")
  (tmp_path / "metrics.jsonl").touch()
  evaluate_module.evaluate(run, Corpus(dict(test=PAIRS)), tmp_path)
  out = capsys.readouterr().out
  assert "@@" not in out and all(line in out for line in (*WORDS, *REFERENCES, "he stares at"))
  written = (tmp_path / "test.translations.txt").read_text("utf-8")
  assert written.splitlines() == WORDS
  result = json.loads((tmp_path / "results.json").read_text())["test"]
  assert result["sacrebleu"] == corpus_bleu(WORDS, REFERENCES, tokenize="none")._asdict()
  # Moses would part the &apos; that it wrote.
  assert result["paper_bleu"] == paper_bleu(WORDS, REFERENCES, "de", tokenized=True)._asdict()
  assert paper_bleu(WORDS, REFERENCES, "de") != paper_bleu(WORDS, REFERENCES, "de", tokenized=True)
  ((*_, sentences), _) = write.call_args
  counts = sentence_statistics(WORDS, REFERENCES, tokenize="none").tolist()
  assert sentences["test"] == [[n, *row] for n, row in zip((8, 1, 8), counts, strict=True)]
  assert draw.call_args[0][1:3] == (PAIRS[0][0], SUBWORDS[0])


def test_scores_and_samples_during_training_are_of_words(run, monkeypatch):
  monkeypatch.setattr(train_module, "make_eval_step", lambda *_, **__: lambda *_: (3.0, 2.0))
  monkeypatch.setattr(train_module, "prefetch", lambda *_: [None])
  monkeypatch.setattr(train_module, "put_batch", lambda batch, mesh: batch)
  reporter = mock.Mock()
  report = train_module._report_valid(run, Corpus(dict(valid=PAIRS)), mock.Mock(), reporter)
  report(types.SimpleNamespace(step=7, params=None))
  bleu = corpus_bleu(WORDS, REFERENCES, tokenize="none").value
  reporter.values.assert_called_once_with(7, dict(valid_loss=1.5, valid_bleu=bleu))
  (_, _, shown), _ = reporter.text.call_args
  assert "@@" not in shown and all(line in shown for line in (*WORDS, *REFERENCES))


def test_translations_are_words(run, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(translate_module, "load_run", lambda _: run)
  (tmp_path / "a.en").write_text("".join(f"{source}\n" for source, _ in PAIRS))
  translate_module.main("", str(tmp_path / "a.en"), beam_size=0, plot="")
  assert capsys.readouterr().out.splitlines() == WORDS
