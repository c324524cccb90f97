"""What tests read in the folder of a run, and how they stop one."""

import json
import signal

from experiments.training.loop import Reporter
from experiments.training.metrics import read_metrics

TIMED = ("time", "tokens_per_second", "seconds_per_step")


def read_json(path):
  return json.loads(path.read_text("utf-8"))


def without(values, *names):
  return {name: value for name, value in values.items() if name not in names}


def metrics(workdir):
  """Returns the lines of metrics.jsonl without times."""
  return [without(line, *TIMED) for line in read_metrics(workdir)]


def results(workdir):
  """Returns results.json without times."""
  splits = read_json(workdir / "results.json")
  return {split: without(row, "seconds") for split, row in splits.items()}


def signal_at(step, number):
  """Returns a method for `Reporter.step` that sends a signal at a step."""
  report = Reporter.step

  def report_and_signal(self, now, metrics):
    if now == step:
      signal.raise_signal(number)
    report(self, now, metrics)

  return report_and_signal
