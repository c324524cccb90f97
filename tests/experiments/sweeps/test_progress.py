"""The progress table of a sweep, on a terminal and elsewhere."""

import datetime
import io
import json
import pathlib

import pytest
import rich.console
from experiments.sweeps import progress as progress_module
from experiments.sweeps.cells import Cell
from experiments.sweeps.progress import Progress, State, finished_state, read_state

CELLS = [
  Cell(name, name, 0, name, 100, pathlib.Path("runs") / name, ("python",))
  for name in ("a-seed0", "b-seed0", "c-seed0")
]


@pytest.fixture
def clock(monkeypatch):
  """The seconds that have gone by, to be set."""
  now = [0.0]
  monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
  return now


def make(terminal: bool):
  console = rich.console.Console(file=io.StringIO(), force_terminal=terminal, width=100)
  return Progress(CELLS, console=console), console.file


def seconds(progress):
  left = progress.time_left()
  return left and left.total_seconds()


def test_time_left_is_that_of_all_updates_left_at_the_pace_so_far(clock):
  progress, _ = make(terminal=False)
  with progress:
    assert progress.time_left() is None
    progress.update("a-seed0", State("running"))
    assert progress.time_left() is None
    clock[0] = 10.0
    progress.update("a-seed0", State("running", 1))  # compiled: no pace to go by
    assert progress.time_left() is None
    progress.update("a-seed0", State("running", 20))
    assert seconds(progress) == 280 / 2
    clock[0] = 50.0
    progress.update("a-seed0", State("finished", 100))
    progress.update("b-seed0", State("running"))
    assert seconds(progress) == 200 / 2
    progress.update("b-seed0", State("failed"))
    assert seconds(progress) == 100 / 2
    progress.update("c-seed0", State("finished", 100))
    assert progress.time_left() == datetime.timedelta(0)


def test_updates_made_before_the_sweep_started_do_not_count_for_its_pace(clock):
  progress, _ = make(terminal=False)
  with progress:
    progress.update("a-seed0", State("finished", 100))
    progress.update("b-seed0", State("running", 50))
    clock[0] = 10.0
    progress.update("b-seed0", State("running", 60))
    assert seconds(progress) == 40 + 100


def test_a_cell_has_its_own_time_left_since_it_started(clock):
  progress, file = make(terminal=False)
  with progress:
    progress.update("a-seed0", State("finished", 100))
    clock[0] = 1000.0
    progress.update("b-seed0", State("running", 50))
    clock[0] = 1070.0
    progress.update("b-seed0", State("running", 60))
  assert file.getvalue().splitlines()[-1].startswith("b-seed0  running  left 0:04:40  step 60/100")


def test_cells_of_a_cluster_are_not_waited_for(clock):
  progress, _ = make(terminal=False)
  with progress:
    progress.update("a-seed0", State("submitted"))
    progress.update("b-seed0", State("running"))
    clock[0] = 10.0
    progress.update("b-seed0", State("running", 10))
    assert seconds(progress) == 90 + 100


def test_where_there_is_no_terminal_each_change_is_a_line_and_time_passing_one(clock):
  progress, file = make(terminal=False)
  with progress:
    progress.update("a-seed0", State("running"))
    for step in (10, 20, 30):
      clock[0] += 25.0
      progress.update("a-seed0", State("running", step, 2.5, 3.5, 7.25))
    progress.update("a-seed0", State("finished", 100, 1.5, 2.25, 8.0, 9.123))
  assert file.getvalue().splitlines() == [
    "a-seed0  running  (0 of 3 finished)",
    "a-seed0  running  left 0:02:55  step 30/100  loss 2.500  valid loss 3.500  valid BLEU 7.2  "
    "(0 of 3 finished, 0:11:15 left)",
    "a-seed0  finished  step 100/100  loss 1.500  valid loss 2.250  valid BLEU 8.0  "
    "test BLEU 9.12  (1 of 3 finished, 0:02:30 left)",
  ]


def test_the_table_shows_every_cell_and_the_time_left(clock):
  progress, file = make(terminal=True)
  with progress:
    progress.update("a-seed0", State("finished", 100, 1.5, 2.25, 8.0, 9.123))
    progress.update("b-seed0", State("running"))
    clock[0] = 10.0
    progress.update("b-seed0", State("running", 50, 2.5))
  last = file.getvalue().rpartition("cell")[2]
  rows = {line.split("│")[1].strip(): line for line in last.splitlines() if "│" in line[:12]}
  assert [*rows] == ["a-seed0", "b-seed0", "c-seed0"]
  assert all(
    word in rows["a-seed0"] for word in ("finished", "100/100", "1.500", "2.250", "8.0", "9.12")
  )
  assert all(word in rows["b-seed0"] for word in ("running", "0:00:10", "50/100", "2.500"))
  assert "waiting" in rows["c-seed0"] and "1 of 3 finished, 0:00:30 left" in last


def test_a_column_without_a_number_is_not_shown():
  """Music has no score but its loss during training."""
  progress = Progress(CELLS, score="NLL")
  titles = lambda: [column.header for column in progress.table().columns]
  assert titles() == ["cell", "state"]
  progress.update("b-seed0", State("running", 50, 2.5, 3.5))
  assert titles() == ["cell", "state", "step", "loss", "valid loss"]
  progress.update("a-seed0", State("finished", 100, 1.5, 2.25, None, 0.4))
  assert titles() == ["cell", "state", "step", "loss", "valid loss", "test NLL"]


def test_a_finished_state_is_its_records(tmp_path):
  cell = CELLS[0]._replace(workdir=tmp_path / "a")
  record = dict(scores=dict(test=dict(nll=0.5)), curve=[[50, 3.0, 1.0], [100, 2.5, None]])
  assert finished_state(cell, record) == State("finished", 100, None, 2.5, None, 0.5)
  assert finished_state(cell, record | dict(curve=[])) == State("finished", 100, test_score=0.5)


def test_a_state_is_that_of_the_last_numbers_in_the_metrics(tmp_path):
  assert read_state(tmp_path / "none", "running") == State("running")
  lines = [
    dict(step=1, loss=9.0),
    dict(step=5, loss=3.0),
    dict(step=5, valid_loss=2.0, valid_bleu=4.0),
    dict(step=6, loss=None),
  ]
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (tmp_path / "metrics.jsonl").write_text(text + '{"step": 7, "lo')
  assert read_state(tmp_path, "running") == State("running", 6, 3.0, 2.0, 4.0)
