"""Metrics, samples and progress of a run, also of one that goes on."""

import io
import re
import resource
import types

import jax
import pytest
import rich.console
from tensorboardX.proto.event_pb2 import Event

from experiments.errors import InputError
from experiments.training import metrics
from experiments.training.metrics import Reporter, read_metrics, track


@pytest.fixture
def clock(monkeypatch):
  clock = types.SimpleNamespace(now=1000.0)
  monkeypatch.setattr(metrics.time, "monotonic", lambda: clock.now)
  return clock


def run(workdir, steps):
  with Reporter(workdir, steps[0] - 1, 100) as reporter:
    for step in steps:
      reporter.step(step, dict(loss=10.0 / step, num_tokens=1000))
      if step % 5 == 0:
        reporter.values(step, dict(valid_loss=20.0 / step))
        reporter.text(step, "valid", f"sample {step}\nsecond line")


def test_the_times_of_a_run_never_go_back_as_clocks_do(tmp_path, clock, monkeypatch):
  for start, now in ((0, 5000.0), (2, 3000.0)):  # the second run is on a machine behind
    monkeypatch.setattr(metrics.time, "time", lambda: now)  # noqa: B023
    with Reporter(tmp_path, start, 100) as reporter:
      for step in (start + 1, start + 2):
        reporter.values(step, dict(valid_loss=1.0))
        now -= 60
        clock.now += 2
  assert [line["time"] for line in read_metrics(tmp_path)] == [5000, 5002, 5002, 5004]


def test_about_a_thousand_steps_are_kept_and_always_the_last(tmp_path):
  with Reporter(tmp_path, 0, 2003) as reporter:
    for step in range(1, 2004):
      reporter.step(step, dict(loss=1.0, num_tokens=1))
  lines = read_metrics(tmp_path)
  assert (len(lines), lines[-1]["step"]) == (1002, 2003)


def test_tensorboard_has_scalars_texts_and_where_the_run_went_on(tmp_path):
  run(tmp_path, range(1, 8))
  run(tmp_path, range(6, 8))
  events = read_events(tmp_path / "tensorboard")
  starts = [event.step for event in events if event.session_log.status == 1]
  assert starts == [1, 6]
  values = [(event.step, x) for event in events for x in event.summary.value]
  scalars = {(step, x.tag, x.simple_value) for step, x in values}
  assert {(2, "loss", 5.0), (5, "valid_loss", 4.0)} < scalars
  texts = [text for _, x in values for text in x.tensor.string_val]
  assert texts == [b"    sample 5\n    second line"]


def test_no_room_is_an_error_and_nobody_waits(tmp_path):
  reporter = Reporter(tmp_path, 0, 1000)
  _, most = before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, most))
  try:
    with pytest.raises(OSError, match="File too large"), reporter:
      for step in range(1, 1001):
        reporter.step(step, dict(loss=1.0, grad_norm=1.0, num_tokens=1, skipped=0))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert (tmp_path / "metrics.jsonl").stat().st_size < 19_000
  assert len(read_metrics(tmp_path)) < 1000


@pytest.mark.parametrize(
  "damage",
  [b"\xff", b"null", b'{"step": 4, "lo', b'{"step": 4, "time": 1, "loss": "1"}'],
)
def test_a_damaged_line_is_named(tmp_path, damage):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(b'{"step": 3, "time": 1, "loss": 1.0}\n' + damage + b"\n")
  words = r"damaged .*metrics\.jsonl \(.*\): delete the line"
  with pytest.raises(InputError, match=words):
    read_metrics(tmp_path)


def read_events(folder):
  events = []
  for path in sorted(folder.iterdir()):
    data = path.read_bytes()
    while data:
      length = int.from_bytes(data[:8], "little")
      events.append(Event.FromString(data[12 : 12 + length]))
      data = data[16 + length :]
  return events


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_gets_a_bar_and_a_file_a_line_now_and_then_and_the_last(
  tmp_path, clock, terminal
):
  console = rich.console.Console(file=io.StringIO(), force_terminal=terminal, width=100)
  with Reporter(tmp_path, 0, 100, console=console) as reporter:
    for step in range(1, 28):
      reporter.step(step, dict(loss=2.0, num_tokens=500))
      clock.now += 0.5
    reporter.text(27, "valid", "[bold]ein Satz[/bold]")
  shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
  assert "step 27/100  loss 2.000  1,000 tokens/s  0:00:36 left" in shown
  assert "[bold]ein Satz[/bold]" in shown
  assert ("━" in shown) == terminal
  steps = re.findall("^step (\\d+)/", shown, re.MULTILINE)
  assert steps == ([] if terminal else ["12", "23", "27"])


def test_steps_before_a_compilation_say_nothing_about_the_time_left(tmp_path, clock):
  console = rich.console.Console(file=io.StringIO(), width=100)
  with Reporter(tmp_path, 0, 100, console=console) as reporter:
    for step in range(1, 21):
      reporter.step(step, dict(loss=2.0, num_tokens=500))
      clock.now += 60 if step < 10 else 0.5
      if step == 10:
        jax.jit(lambda x: x + 1).lower(1.0).compile()
  assert (
    "step 20/100  loss 2.000  1,000 tokens/s  0:00:40 left" in console.file.getvalue()
  )


def test_the_first_items_say_nothing_about_the_time_left(clock, capsys):
  for item in track(range(100), 100, "lines"):
    clock.now += 60 if item < 5 else 0.1
  shown = capsys.readouterr().err
  assert "lines, 10.0 a second" in shown
  assert not re.search(r"[1-9]:\d\d left", shown)
