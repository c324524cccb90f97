"""Tests the command sweep with a stand-in for the trainings."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from experiments import command, sweep, train
from experiments.evaluation.records import read_records
from experiments.sweep import plan_runs

CONFIG_FILE = """from configs import quickstart

def get_config():
  config = quickstart.get_config()
  config.name = "three"
  return config

def sweep():
  for k in (1, 2, 4):
    yield f"k={k}", {"model.max_distance": k}
"""

# Takes the flags of train, and does what do.json says for the cell; logs how it was
# started.
FAKE = """import ctypes, json, os, pathlib, shutil, sys, time
here = pathlib.Path(__file__).parent
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:])
workdir = pathlib.Path(flags["workdir"])
task = json.loads((here / "do.json").read_text()).get(workdir.name, "finish")
ctypes.CDLL(None).prctl(2, ctypes.byref(signal := ctypes.c_int()))  # PR_GET_PDEATHSIG
call = dict(cell=workdir.name, pid=os.getpid(), signal=signal.value)
call["cores"] = sorted(os.sched_getaffinity(0))
call["memory"] = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
with open(here / "calls.jsonl", "a") as file:
  file.write(json.dumps(call) + "\\n")
workdir.mkdir(parents=True, exist_ok=True)
if task == "hang":
  (here / "hanging").touch()
  time.sleep(60)
if task == "fail":
  print("loading")
  sys.exit("stopped: step 2: loss nan")
shutil.copy(here / "records" / f"{workdir.name}.json", workdir / "record.json")
"""


@pytest.fixture
def room(tmp_path, monkeypatch, request):
  """Returns a folder with a sweep of three rows and a stand-in for their trainings."""
  monkeypatch.chdir(request.config.rootpath)
  monkeypatch.setattr(sweep, "TRAIN", ("python", str(tmp_path / "fake.py")))
  monkeypatch.setattr(sweep, "_POLL_SECONDS", 0.02)
  (tmp_path / "three.py").write_text(CONFIG_FILE)
  (tmp_path / "fake.py").write_text(FAKE)
  (tmp_path / "calls.jsonl").touch()
  (tmp_path / "records").mkdir()
  plan(tmp_path)
  return tmp_path


def plan(room, file="three.py"):
  """Plans a sweep and prepares the records that the stand-in writes."""
  sweep_file = command.parse(dict(config=command.SWEEP), [f"--config={room}/{file}"])[
    "config"
  ]
  for cell in plan_runs(sweep_file, 2, room / "runs"):
    record = dict(sweep="", row="", seed=cell.seed, digest=cell.digest, config={})
    (room / "records" / f"{cell.workdir.name}.json").write_text(
      f"{json.dumps(record)}\n"
    )


@pytest.fixture
def swept(call, room):
  """Runs the command sweep in the room: swept("--parallel=2", do=dict(...))."""

  def swept(*arguments, do=None, seeds=1, file="three.py"):
    (room / "do.json").write_text(json.dumps(do or {}))
    folders = f"--out={room}/runs", f"--results={room}/results"
    return call(
      "sweep", f"--config={room}/{file}", *folders, f"--seeds={seeds}", *arguments
    )

  return swept


def calls(room):
  return [json.loads(line) for line in (room / "calls.jsonl").read_text().splitlines()]


def names(room):
  return [one["cell"] for one in calls(room)]


def results(room, name="three"):
  return [
    (one["row"], one["seed"])
    for one in read_records(room / "results" / "runs" / f"{name}.jsonl")
  ]


CELLS = ["k-1-seed0", "k-2-seed0", "k-4-seed0"]
RESULTS = [("k=1", 0), ("k=2", 0), ("k=4", 0)]


def test_rows_are_trained_seed_by_seed_and_finished_cells_skipped(room, swept):
  answers = [swept(seeds=1), swept("--parallel=2", seeds=2), swept(seeds=1)]
  assert names(room)[:3] == CELLS
  assert sorted(names(room)[3:]) == ["k-1-seed1", "k-2-seed1", "k-4-seed1"]
  assert results(room) == [*RESULTS, ("k=1", 1), ("k=2", 1), ("k=4", 1)]
  assert {
    one["sweep"] for one in read_records(room / "results" / "runs" / "three.jsonl")
  } == {"three"}
  assert (
    f"three: 6 of 6 are finished; {room}/results/runs/three.jsonl\n" in answers[1].out
  )
  assert {one["signal"] for one in calls(room)} == {
    signal.SIGKILL
  }  # sent if the sweep is killed
  cores = sorted(os.sched_getaffinity(0))
  shares = sorted(one["cores"] for one in calls(room)[3:])[
    ::2
  ]  # the first and the last of three
  assert shares == sorted([cores[::2], cores[1::2] or cores])
  assert {one["memory"] for one in calls(room)[3:]} == {"0.450"}
  before = (room / "results" / "runs" / "three.jsonl").read_bytes()
  for lost in ("results", "runs"):
    shutil.rmtree(room / lost)
    assert (swept(seeds=2).status, len(calls(room))) == (0, 6)
    assert (room / "results" / "runs" / "three.jsonl").read_bytes() == before


def test_one_row_is_trained_by_its_name(room, swept):
  swept("--only=k=4", seeds=2)
  assert names(room) == ["k-4-seed0", "k-4-seed1"] and results(room) == [
    ("k=4", 0),
    ("k=4", 1),
  ]
  answer = swept("--only=k=1", "--dry_run", seeds=1)
  assert answer.out.count("\n") == 1 and "0 of 1 are finished" in answer.err
  anew = "every run has a record: give --results=FOLDER --out=FOLDER to train again\n"
  assert swept("--only=k=4").err == anew
  assert "three: 1 of 1 are finished" in swept("--only=k=1").out
  assert results(room) == [
    ("k=1", 0),
    ("k=4", 0),
    ("k=4", 1),
  ]  # no row's records are lost


def test_records_of_the_same_config_in_another_sweep_are_taken_and_no_others(
  room, swept
):
  swept()
  text = CONFIG_FILE.replace('"three"', '"two"').replace("(1, 2, 4)", "(4, 8)")
  (room / "two.py").write_text(text.replace("k={k}", "clip {k}"))
  plan(room, "two.py")
  (command,) = swept("--dry_run", file="two.py").out.splitlines()
  assert command.endswith("clip-8-seed0")
  answer = swept(file="two.py")
  assert answer.status == 0 and names(room) == [*CELLS, "clip-8-seed0"]
  assert "clip-4-seed0 is 'k=4', seed 0, of three.jsonl\n" in answer.err
  assert results(room, "two") == [("clip 4", 0), ("clip 8", 0)]
  records = read_records(room / "results" / "runs" / "two.jsonl")
  assert [one["sweep"] for one in records] == ["two", "two"]
  (room / "results" / "runs" / "three.jsonl").unlink()
  first, second = (room / "runs" / "three" / name / "record.json" for name in CELLS[:2])
  second.write_text(first.read_text())
  assert (swept().status, names(room)[4:]) == (0, [CELLS[1]])


def test_a_failed_cell_keeps_its_error_and_is_resumed(room, swept, contents):
  answer = swept(do={"k-2-seed0": "fail"})
  error = room / "runs" / "three" / "k-2-seed0.error.txt"
  assert (answer.status, names(room)) == (1, CELLS)
  assert error.read_text() == "exit status 1\nloading\nstopped: step 2: loss nan\n"
  assert answer.err.splitlines()[-1] == f"failed: {error}: stopped: step 2: loss nan"
  assert "three: 2 of 3 are finished" in answer.out
  assert "k-1-seed0: running (1 running, 2 waiting)" in answer.err
  assert results(room) == [RESULTS[0], RESULTS[2]]
  before = contents(room)
  assert swept("--dry_run", do={"k-2-seed0": "fail"}).out == (
    f"python {room}/fake.py --config={room}/three.py --config.model.max_distance=2 "
    f"--config.seed=0 --workdir={room}/runs/three/k-2-seed0\n"
  )
  assert contents(room) == before
  assert (swept().status, names(room)) == (0, [*CELLS, "k-2-seed0"])
  assert results(room) == RESULTS and not error.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_trainings_and_keeps_finished_results(
  number, room, swept, monkeypatch
):
  def sleep(seconds, sleep=time.sleep):
    sleep(seconds)
    if (room / "hanging").exists():
      (room / "hanging").unlink()
      os.kill(os.getpid(), number)

  monkeypatch.setattr(sweep.time, "sleep", sleep)
  handler = signal.getsignal(number)
  assert swept(do={"k-2-seed0": "hang"}).status == 128 + number
  assert names(room) == CELLS[:2] and results(room) == RESULTS[:1]
  assert signal.getsignal(number) is handler
  with pytest.raises(ProcessLookupError):
    os.kill(calls(room)[-1]["pid"], 0)


def test_one_sweep_at_a_time_works_in_a_folder(room, swept):
  with command.lock_folder(room / "runs" / "three", "out"):
    swept().assert_refused(
      f"another command is using {room}/runs/three: give another --out"
    )
    assert swept("--dry_run").status == 0
  assert not calls(room) and not (room / "results").exists()


def test_the_commands_that_a_dry_run_prints_may_run_elsewhere(room, swept):
  for line in swept("--dry_run").out.splitlines():
    subprocess.run(
      f"{sys.executable} {line.removeprefix('python')}", shell=True, check=True
    )
  assert names(room) == CELLS
  assert swept().status == 0 and len(calls(room)) == 3 and results(room) == RESULTS


def test_changes_on_the_command_line_reach_all_cells(room, swept):
  (room / "three.py").write_text(CONFIG_FILE + "  yield 'own', {'mesh.tensor': 2}\n")
  changes = ("mesh.data=16", "name=other", "seed=5", "model.max_distance=8")
  answer = swept(*(f"--config.{change}" for change in changes), "--dry_run")
  commands = [
    command.parse(train.FLAGS, line.split()[2:]) for line in answer.out.splitlines()
  ]
  found = [(c["config"].seed, c["config"].model.max_distance) for c in commands]
  assert found == [(5, 1), (5, 2), (5, 4), (5, 8)], answer.err
  assert commands[3]["workdir"] == room / "runs/other/own-seed5"


ROWS = 'for k in (1, 2, 4):\n    yield f"k={k}", {"model.max_distance": k}'


@pytest.mark.parametrize(
  "rows, flag, words",
  [
    (
      ROWS,
      "--config.model.max_distance=16",
      "model.max_distance has no effect three.py",
    ),
    (ROWS, "--only=k=3", "--only=k=3 three.py: k=1; k=2; k=4"),
    (
      ROWS,
      "--config.model.num_heads=3",
      "configuration 'k=1' config.model num_heads, 3",
    ),
    (
      ROWS,
      "--config=configs/quickstart.py",
      "quickstart.py has no sweep() configs/table1.py",
    ),
    ("yield 'k=4', {}\n  yield 'k 4', {'model.width': 64}", "", "two rows same name"),
    ("yield 'a', {}\n  yield 'b', {}", "", "two rows same config"),
  ],
)
def test_mistakes_are_refused_before_anything_runs(room, swept, rows, flag, words):
  (room / "three.py").write_text(CONFIG_FILE.replace(ROWS, rows))
  swept(*[flag] * bool(flag)).assert_refused(words)
  assert (
    not calls(room) and not (room / "runs").exists() and not (room / "results").exists()
  )


@pytest.mark.parametrize(
  "change, words",
  [
    (lambda lines: [*lines, lines[0]], "has two lines of one configuration and seed"),
    (
      lambda lines: [lines[0].replace("k=1", "k=4")],
      "'k=4', seed 0, another config --results",
    ),
  ],
)
def test_contradictory_results_are_refused_and_kept(
  room, swept, contents, change, words
):
  swept()
  path = room / "results" / "runs" / "three.jsonl"
  path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
  before = contents(room)
  swept().assert_refused(f"{path} {words}")
  assert contents(room) == before


@pytest.mark.parametrize("name", ["sweep", "report"])
def test_the_results_are_the_folder_above_the_records(room, call, name):
  config = [f"--config={room}/three.py"] if name == "sweep" else []
  answer = call(name, *config, f"--results={room}/results/runs")
  answer.assert_refused(
    f"error: --results={room}/results/runs give --results={room}/results:"
  )
  assert not calls(room) and not (room / "results").exists()


def test_records_beside_the_folder_of_records_are_not_trained_again(room, swept):
  swept()
  (room / "results" / "runs" / "three.jsonl").rename(room / "results" / "three.jsonl")
  swept().assert_refused(f"move {room}/results/three.jsonl into {room}/results/runs")
  assert len(calls(room)) == 3
