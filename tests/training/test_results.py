"""Tests of what a finished training records."""

from experiments.evaluation.records import make_record

ENVIRONMENT = dict(
  git_commit="0" * 40,
  date="2026-01-01",
  devices="1 x cpu",
  cpu_cores=2,
  cpu="any",
  python="3.11",
  packages={},
)


def test_the_curve_of_a_record_has_the_score_that_is_named():
  metrics = [
    {"step": 1, "time": 0.0, "loss": 9.0},
    {"step": 2, "time": 1.0, "valid_loss": 8.0, "valid_words": 7.0, "valid_bleu": 30.0},
  ]
  config = {"name": "mine", "seed": 0, "batches": {"tokens": 16}}
  files = config, {}, ENVIRONMENT, metrics, {}, {}, [2]
  assert make_record(*files, "valid_bleu")["curve"] == [[2, 8.0, 30.0]]
  assert make_record(*files, "valid_nll")["curve"] == [[2, 8.0, None]]
