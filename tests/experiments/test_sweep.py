"""Tests the command sweep with a stand-in for the trainings."""

import contextlib
import json
import os
import shutil
import signal
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


@pytest.fixture(scope="module")
def planned(tmp_path_factory, request):
  """Returns a folder with a sweep of three rows and the records of its runs."""
  folder = tmp_path_factory.mktemp("planned")
  (folder / "three.py").write_text(CONFIG_FILE)
  (folder / "records").mkdir()
  with contextlib.chdir(request.config.rootpath):
    plan(folder)
  return folder


@pytest.fixture
def room(planned, tmp_path, monkeypatch, request):
  """Returns such a folder, with a stand-in for the trainings."""
  monkeypatch.chdir(request.config.rootpath)
  monkeypatch.setattr(sweep, "TRAIN", ("python", str(tmp_path / "fake.py")))
  monkeypatch.setattr(sweep, "_POLL_SECONDS", 0.02)
  shutil.copytree(planned, tmp_path, dirs_exist_ok=True)
  (tmp_path / "fake.py").write_text(FAKE)
  (tmp_path / "calls.jsonl").touch()
  return tmp_path


def plan(room, file="three.py"):
  """Plans a sweep and prepares the records that the stand-in writes."""
  values = command.parse({"config": command.SWEEP}, [f"--config={room}/{file}"])
  for cell in plan_runs(values["config"], 2, room / "runs"):
    record = dict(sweep="", row="", seed=cell.seed, digest=cell.digest, config={})
    path = room / "records" / f"{cell.workdir.name}.json"
    path.write_text(f"{json.dumps(record)}\n")


@pytest.fixture
def swept(call, room):
  """Runs the command sweep in the room: swept("--parallel=2", do=dict(...))."""

  def swept(*arguments, do=None, seeds=1, file="three.py"):
    (room / "do.json").write_text(json.dumps(do or {}))
    flags = f"--out={room}/runs", f"--results={room}/results", f"--seeds={seeds}"
    return call("sweep", f"--config={room}/{file}", *flags, *arguments)

  return swept


def calls(room):
  return [json.loads(line) for line in (room / "calls.jsonl").read_text().splitlines()]


def names(room):
  return [call["cell"] for call in calls(room)]


def records_file(room, name="three"):
  return room / "results" / "runs" / f"{name}.jsonl"


def results(room, name="three"):
  records = read_records(records_file(room, name))
  return [(record["row"], record["seed"]) for record in records]


CELLS = ["k-1-seed0", "k-2-seed0", "k-4-seed0"]
RESULTS = [("k=1", 0), ("k=2", 0), ("k=4", 0)]


def test_rows_are_trained_seed_by_seed_and_finished_cells_skipped(room, swept):
  swept(seeds=1)
  assert names(room) == CELLS
  answer = swept(seeds=2)
  assert names(room)[3:] == ["k-1-seed1", "k-2-seed1", "k-4-seed1"]
  assert results(room) == [*RESULTS, ("k=1", 1), ("k=2", 1), ("k=4", 1)]
  file = records_file(room)
  assert f"three: 6 of 6 are finished; {file}\n" in answer.out
  signals = {call["signal"] for call in calls(room)}
  assert signals == {signal.SIGKILL}  # sent if the sweep is killed
  before = file.read_bytes()
  for lost in ("results", "runs"):
    shutil.rmtree(room / lost)
    assert swept(seeds=2).status == 0
    assert len(calls(room)) == 6
    assert file.read_bytes() == before


def test_cells_at_once_share_cores_and_memory(room, swept):
  swept("--parallel=2")
  cores = sorted(os.sched_getaffinity(0))
  first, _, last = sorted(call["cores"] for call in calls(room))
  assert [first, last] == sorted([cores[::2], cores[1::2] or cores])
  assert {call["memory"] for call in calls(room)} == {"0.450"}


def test_pairs_without_test_sets_are_refused(swept):
  changes = ("data.source=pairs", "data.pairs.train=t.tsv", "data.pairs.valid=v.tsv")
  answer = swept(*(f"--config.{change}" for change in changes))
  answer.assert_refused("no test scores to compare: give config.data.pairs.test")


def test_one_row_is_trained_by_its_name(room, swept):
  swept("--only=k=4", seeds=2)
  assert names(room) == ["k-4-seed0", "k-4-seed1"]
  anew = "every run has a record: give --results=FOLDER --out=FOLDER to train again\n"
  assert swept("--only=k=4").err == anew
  assert "three: 1 of 1 are finished" in swept("--only=k=1").out
  # No row's records are lost.
  assert results(room) == [("k=1", 0), ("k=4", 0), ("k=4", 1)]


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
  assert names(room) == [*CELLS, "clip-8-seed0"]
  assert "clip-4-seed0 is 'k=4', seed 0, of three.jsonl\n" in answer.err
  assert results(room, "two") == [("clip 4", 0), ("clip 8", 0)]
  records_file(room).unlink()
  first, second = (room / "runs" / "three" / name / "record.json" for name in CELLS[:2])
  second.write_text(first.read_text())
  assert (swept().status, names(room)[4:]) == (0, [CELLS[1]])


def test_a_failed_cell_keeps_its_error_and_is_resumed(room, swept, contents):
  answer = swept(do={"k-2-seed0": "fail"})
  error = room / "runs" / "three" / "k-2-seed0.error.txt"
  assert (answer.status, names(room)) == (1, CELLS)
  assert error.read_text() == "exit status 1\nloading\nstopped: step 2: loss nan\n"
  assert answer.err.splitlines()[-1] == f"failed: {error}: stopped: step 2: loss nan"
  assert results(room) == [RESULTS[0], RESULTS[2]]
  before = contents(room)
  assert swept("--dry_run", do={"k-2-seed0": "fail"}).out == (
    f"python {room}/fake.py --config={room}/three.py --config.model.max_distance=2 "
    f"--config.seed=0 --workdir={room}/runs/three/k-2-seed0\n"
  )
  assert contents(room) == before
  assert (swept().status, names(room)) == (0, [*CELLS, "k-2-seed0"])
  assert results(room) == RESULTS
  assert not error.exists()


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
  assert names(room) == CELLS[:2]
  assert results(room) == RESULTS[:1]
  assert signal.getsignal(number) is handler
  with pytest.raises(ProcessLookupError):
    os.kill(calls(room)[-1]["pid"], 0)


def test_one_sweep_at_a_time_works_in_a_folder(room, swept):
  out = room / "runs" / "three"
  with command.lock_folder(out, "out"):
    answer = swept()
    assert swept("--dry_run").status == 0
  answer.assert_refused(f"another command is using {out}: give another --out")
  assert not calls(room)
  assert not (room / "results").exists()


def test_changes_on_the_command_line_reach_all_cells(room, swept):
  changes = ("mesh.data=16", "name=other", "seed=5", "model.width=64")
  answer = swept(*(f"--config.{change}" for change in changes), "--dry_run")
  lines = [line.split()[2:] for line in answer.out.splitlines()]
  values = [command.parse(train.FLAGS, words) for words in lines]
  assert values[2]["workdir"] == room / "runs/other/k-4-seed5"
  for distance, config in zip((1, 2, 4), [x["config"] for x in values], strict=True):
    assert (config.model.max_distance, config.model.width) == (distance, 64)
    assert config.seed == 5


ROWS = 'for k in (1, 2, 4):\n    yield f"k={k}", {"model.max_distance": k}'


@pytest.mark.parametrize(
  "rows, flag, words",
  [
    (ROWS, "--config.model.max_distance=16", "max_distance has no effect three.py"),
    (ROWS, "--only=k=3", "--only=k=3 three.py: k=1; k=2; k=4"),
    (ROWS, "--config.model.num_heads=3", "configuration 'k=1' num_heads, 3"),
    (ROWS, "--config=configs/quickstart.py", "has no sweep() configs/table1.py"),
    ("yield 'a', {}\n  yield 'b', {}", "", "two configurations same config"),
  ],
)
def test_mistakes_are_refused_before_anything_runs(room, swept, rows, flag, words):
  (room / "three.py").write_text(CONFIG_FILE.replace(ROWS, rows))
  swept(*flag.split()).assert_refused(words)
  assert not calls(room)
  assert not (room / "runs").exists()


def test_contradictory_results_are_refused_and_kept(room, swept, contents):
  swept("--only=k=1")
  path = records_file(room)
  path.write_text(path.read_text().replace("k=1", "k=4"))
  before = contents(room)
  swept().assert_refused(f"{path} 'k=4', seed 0, another config --results")
  assert contents(room) == before


def test_the_results_are_the_folder_above_the_records(room, call):
  answer = call("report", f"--results={room}/results/runs")
  answer.assert_refused(f"error: {room}/results/runs give {room}/results:")
