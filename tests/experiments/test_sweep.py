"""The command sweep: each cell once, in order, and nothing lost. Its trainings here are a fake."""

import contextlib
import errno
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from experiments.sweeps import cells as cells_module
from experiments.sweeps import local, progress
from experiments.sweeps.book import Book
from experiments.sweeps.cells import plan_cells

from configs import default
from experiments import command, locks, train
from experiments.validation import validate
from experiments.values import changes
from relpos_jax.evaluation.record import digest, read_records

CONFIG_FILE = '''"""Three rows of a small model."""

from configs import quickstart


def get_config(argument: str = ""):
  config = quickstart.get_config()
  config.name = "three"
  config.training.num_steps = 100
  return config


def sweep():
  for k in (1, 2, 4):
    yield f"k={k}", {"model.max_distance": k}
'''
ROWS = ("k-1", "k-2", "k-4")

# Takes the flags of train, and does what do.json says for the cell; writes what it was called with.
FAKE = '''"""Trains nothing."""
import json, os, pathlib, sys, time

here = pathlib.Path(__file__).parent
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:])
workdir = pathlib.Path(flags["workdir"])
task = json.loads((here / "do.json").read_text()).get(workdir.name, "finish")
cores = sorted(os.sched_getaffinity(0))
memory = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
call = dict(cell=workdir.name, task=task, pid=os.getpid(), cores=cores, memory=memory)
with open(here / "calls.jsonl", "a") as file:
  file.write(json.dumps(call) + "\\n")
workdir.mkdir(parents=True, exist_ok=True)
if task == "meet":
  (here / f"{workdir.name}.there").touch()
  end = time.monotonic() + 20
  while len([*here.glob("*.there")]) < 2:
    assert time.monotonic() < end, "nobody came"
    time.sleep(0.01)
if task == "hang":
  (here / "hanging").touch()
  time.sleep(60)
if task == "fail":
  print("loading")
  sys.exit("stopped: step 2: loss nan")
if task == "stop":
  line = dict(step=50, loss=2.0)
  (workdir / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
  sys.exit(130)
text = (here / "records" / f"{workdir.name}.json").read_text()
(workdir / "record.json").write_text(text[:40] if task == "half" else text)
'''


@pytest.fixture
def room(tmp_path, monkeypatch, request):
  """A folder with a sweep of three rows whose trainings are fake."""
  monkeypatch.chdir(request.config.rootpath)  # as the commands' users are
  monkeypatch.setattr(cells_module, "TRAIN", ("python", str(tmp_path / "fake.py")))
  monkeypatch.setattr(cells_module, "validate", lambda *_: None)
  (tmp_path / "three.py").write_text(CONFIG_FILE)
  (tmp_path / "fake.py").write_text(FAKE)
  (tmp_path / "do.json").write_text("{}")
  (tmp_path / "calls.jsonl").touch()
  (tmp_path / "records").mkdir()
  for cell in plan(tmp_path, seeds=4):
    (tmp_path / "records" / f"{cell.name}.json").write_text(json.dumps(record_of(cell)))
  return tmp_path


def plan(room, file="three.py", seeds=2, changes=()):
  arguments = [f"--config={room}/{file}", *changes]
  sweep_file = command.parse(dict(config=command.SWEEP), arguments)["config"]
  return plan_cells(sweep_file, seeds, room / "runs")


def record_of(cell, **changes):
  """A record as train would leave it."""
  scores = dict(test=dict(sacrebleu=10.0 + cell.seed, paper_bleu=9.0, signatures={}))
  values = dict(sweep="", row="three", seed=cell.seed, digest=cell.digest, config={}, commit="abc")
  values |= dict(date="", hardware="", packages={}, budget={}, scores=scores, sentences={})
  return values | dict(curve=[[cell.num_steps, 2.5, 7.0]]) | changes


@pytest.fixture
def swept(call, room):
  """Runs the command sweep in the room: swept("--parallel=2", do=dict(...))."""

  def swept(*arguments, do=None, seeds=2, file="three.py"):
    (room / "do.json").write_text(json.dumps(do or {}))
    folders = f"--out={room}/runs", f"--results={room}/results"
    return call("sweep", f"--config={room}/{file}", *folders, f"--seeds={seeds}", *arguments)

  return swept


def calls(room):
  return [json.loads(line) for line in (room / "calls.jsonl").read_text().splitlines()]


def names(room):
  return [one["cell"] for one in calls(room)]


def results(room, name="three"):
  return [(one["row"], one["seed"]) for one in read_records(room / "results" / f"{name}.jsonl")]


ALL = [f"{row}-seed{seed}" for seed in (0, 1) for row in ROWS]
ALL_RESULTS = [(row, seed) for seed in (0, 1) for row in ("k=1", "k=2", "k=4")]


# The order, and what is left to do ----------------------------------------------------------------


def test_every_row_has_its_first_seed_before_any_its_second(room, swept):
  answer = swept()
  assert (answer.status, names(room)) == (0, ALL), answer.err
  assert results(room) == ALL_RESULTS
  assert all(one["sweep"] == "three" for one in read_records(room / "results" / "three.jsonl"))
  assert f"three: 6 of 6 finished; {room}/results/three.jsonl\n" in answer.out


def test_each_cell_trains_in_a_folder_of_its_own_with_its_output_beside_it(room, swept):
  swept(do={"k-2-seed0": "fail"})
  folder = room / "runs" / "three"
  assert {path.name for path in folder.iterdir() if path.is_dir()} == {*ALL}
  assert (folder / "k-2-seed0.log").read_text() == "loading\nstopped: step 2: loss nan\n"


def test_what_is_finished_is_skipped_and_the_results_stay(room, swept):
  swept()
  before = (room / "results" / "three.jsonl").read_bytes()
  again = swept()
  assert (again.status, len(calls(room))) == (0, 6)
  assert (room / "results" / "three.jsonl").read_bytes() == before


def test_results_without_their_folders_are_finished_too(room, swept):
  """As after cloning the repository: the runs' folders are not in it."""
  swept()
  shutil.rmtree(room / "runs")
  assert (swept().status, len(calls(room))) == (0, 6)
  assert results(room) == ALL_RESULTS


def test_folders_without_their_results_are_collected(room, swept):
  swept()
  shutil.rmtree(room / "results")
  assert (swept().status, len(calls(room))) == (0, 6)
  assert results(room) == ALL_RESULTS


def test_more_seeds_add_to_the_results_and_fewer_take_none_away(room, swept):
  swept(seeds=1)
  swept(seeds=3)
  swept(seeds=2)
  assert len(calls(room)) == 9
  assert sorted(results(room)) == sorted((f"k={k}", seed) for k in (1, 2, 4) for seed in range(3))


def test_what_is_not_finished_is_run_again_in_its_folder(room, swept):
  assert swept(do={"k-4-seed0": "stop"}).status == 1
  metrics = room / "runs" / "three" / "k-4-seed0" / "metrics.jsonl"
  assert metrics.exists()
  assert swept().status == 0
  assert names(room) == [*ALL, "k-4-seed0"] and metrics.exists()
  assert results(room) == ALL_RESULTS


def test_a_half_written_record_in_a_folder_is_not_finished(room, swept):
  answer = swept(do={"k-1-seed0": "half"})
  assert answer.status == 1
  text = (room / "runs" / "three" / "k-1-seed0.error.txt").read_text()
  assert text == "no record.json of this config in its folder\n"
  assert (swept().status, names(room)) == (0, [*ALL, "k-1-seed0"])


def test_a_folder_of_another_config_is_not_finished(room, swept):
  swept(seeds=1)
  (room / "results" / "three.jsonl").unlink()
  file = room / "runs" / "three" / "k-1-seed0" / "record.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | dict(digest="0" * 12)))
  swept(seeds=1)
  assert names(room) == [*ALL[:3], "k-1-seed0"]


def test_the_same_config_in_another_sweeps_results_is_taken_and_named(room, swept):
  swept(seeds=1)
  text = (room / "three.py").read_text().replace('"three"', '"two"').replace("(1, 2, 4)", "(4, 8)")
  (room / "two.py").write_text(text.replace("k={k}", "clip {k}"))
  for cell in plan(room, "two.py", seeds=1):
    (room / "records" / f"{cell.name}.json").write_text(json.dumps(record_of(cell)))
  answer = swept(seeds=1, file="two.py")
  assert answer.status == 0 and names(room) == [*ALL[:3], "clip-8-seed0"]
  assert "clip-4-seed0 is 'k=4', seed 0, of three.jsonl\n" in answer.out
  assert results(room, "two") == [("clip 4", 0), ("clip 8", 0)]
  assert [one["sweep"] for one in read_records(room / "results" / "two.jsonl")] == ["two", "two"]


def test_results_of_another_commit_are_named(room, swept):
  swept(seeds=1)
  line = next(line for line in swept(seeds=1).out.splitlines() if "commit abc" in line)
  assert line.startswith("3 of 3 cells were finished at commit abc, now ")
  assert f"{room}/results/three.jsonl" in line


def test_the_config_of_all_cells_changes_on_the_command_line(room, swept):
  arguments = ("--config.training.warmup_steps=7", "--config.name=other", "--config.seed=5")
  answer = swept(*arguments, "--dry_run", seeds=1)
  commands = [shlex.split(line) for line in answer.out.splitlines()]
  assert len(commands) == 3
  assert all({*arguments} <= {*words} for words in commands)
  assert [words[-1] for words in commands] == [
    f"--workdir={room}/runs/other/{row}-seed5" for row in ROWS
  ]


# What fails ---------------------------------------------------------------------------------------


def test_a_failed_cell_keeps_its_error_and_the_others_go_on(room, swept):
  answer = swept(do={"k-2-seed0": "fail"})
  error = room / "runs" / "three" / "k-2-seed0.error.txt"
  assert (answer.status, names(room)) == (1, ALL)
  assert error.read_text() == "loading\nstopped: step 2: loss nan\nexit status 1\n"
  assert answer.err.splitlines()[-1] == f"failed: {error}: stopped: step 2: loss nan"
  assert "three: 5 of 6 finished, 1 failed" in answer.out
  assert results(room) == [key for key in ALL_RESULTS if key != ("k=2", 0)]


def test_a_failed_cell_is_tried_again_and_its_error_goes(room, swept):
  swept(do={"k-2-seed0": "fail"})
  assert (swept().status, names(room)) == (0, [*ALL, "k-2-seed0"])
  assert results(room) == ALL_RESULTS  # in their places
  assert not [*room.rglob("*.error.txt")]


def test_the_results_are_whole_after_each_cell(room, swept, monkeypatch):
  seen = []
  write = Book.write
  monkeypatch.setattr(Book, "write", lambda book: (write(book), seen.append(len(book.records))))
  swept(seeds=1)
  assert seen == [0, 1, 2, 3]


def interrupt():
  raise KeyboardInterrupt


@pytest.mark.parametrize(
  "end, status, last_line",
  [
    (interrupt, 130, "interrupted"),
    (
      lambda: os.kill(os.getpid(), signal.SIGTERM),
      143,
      "stopped by SIGTERM: the same command goes on",
    ),
  ],
)
def test_what_ends_a_sweep_ends_the_trainings_and_keeps_what_is_finished(
  room, swept, monkeypatch, end, status, last_line
):
  def end_when_it_hangs(workdir, word):
    if (room / "hanging").exists():
      end()
    return progress.State(word)

  monkeypatch.setattr(local, "read_state", end_when_it_hangs)
  monkeypatch.setattr(local, "_READ_SECONDS", 0.0)
  handler = signal.getsignal(signal.SIGTERM)
  answer = swept(do={"k-2-seed0": "hang"})
  assert (answer.status, answer.err.splitlines()[-1]) == (status, last_line)
  assert names(room) == ALL[:2] and results(room) == [("k=1", 0)]
  assert signal.getsignal(signal.SIGTERM) is handler
  with pytest.raises(ProcessLookupError):
    os.kill(calls(room)[-1]["pid"], 0)


KILLED = '''"""A sweep that is killed as soon as its first training has begun."""
import os, pathlib, sys, types

from experiments.sweeps import local
from experiments.sweeps.cells import Cell

workdir = pathlib.Path(sys.argv[1])
cell = Cell("a", "a", 0, "", 1, workdir, ("python", "-c", "import time; time.sleep(60)"))
silent = types.SimpleNamespace(update=lambda *_: None)
print(local._start(cell, 0, local.core_shares(1)[0], 1, silent).process.pid, flush=True)
os.kill(os.getpid(), 9)
'''


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells children")
def test_a_sweep_that_is_killed_leaves_no_training_behind(tmp_path, request):
  """Nothing else would train in its folder when the sweep begins again."""
  words = [sys.executable, "-c", KILLED, str(tmp_path / "a")]
  killed = subprocess.run(words, capture_output=True, text=True, cwd=request.config.rootpath)
  assert killed.returncode == -signal.SIGKILL, killed.stderr
  state, end = pathlib.Path("/proc") / killed.stdout.strip() / "stat", time.monotonic() + 10
  with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is gone, as it should be
    while ") Z" not in state.read_text():  # nor does it wait to be reaped
      assert time.monotonic() < end, "it goes on"
      time.sleep(0.05)


# Several sweeps at once ---------------------------------------------------------------------------

HOLDER = """import pathlib, sys, time

from experiments.locks import alone_in

with alone_in(pathlib.Path(sys.argv[1])):
  print(flush=True)
  time.sleep(60)
"""


@pytest.fixture
def another(room, request):
  """A process that is at work in the sweep's folder."""
  folder = room / "runs" / "three"
  folder.mkdir(parents=True)
  words = [sys.executable, "-c", HOLDER, str(folder)]
  root = request.config.rootpath
  with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=root) as process:
    process.stdout.readline()
    yield process
    process.kill()


def test_a_sweep_keeps_others_out_of_its_folder_until_it_ends_however_it_ends(
  room, swept, another, cluster
):
  words = f"another sweep is at work in {room}/runs/three: wait for it, or give another --out"
  for arguments in ([], [cluster[0]]):
    refused(swept(*arguments, seeds=1), words)
  assert not calls(room) and not cluster[1]() and not (room / "results").exists()
  assert swept("--dry_run", seeds=1).status == 0  # it only looks
  assert swept("--config.name=other", seeds=1).status == 0
  another.kill()
  another.wait()
  assert swept(seeds=1).status == 0
  assert swept(seeds=1).status == 0 and results(room) == ALL_RESULTS[:3]


def test_a_training_does_not_hold_the_folder_of_its_sweep(room):
  """It could not be ended otherwise where it outlives the sweep."""
  with locks.alone_in(room):
    training = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
  try:
    with locks.alone_in(room):
      pass
  finally:
    training.kill()
    training.wait()


def test_where_files_have_no_locks_a_sweep_says_so_and_goes_on(room, swept, monkeypatch):
  def flock(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")

  monkeypatch.setattr(locks.fcntl, "flock", flock)
  answer = swept(seeds=1)
  assert (answer.status, results(room)) == (0, ALL_RESULTS[:3])
  assert f"{room}/runs/three cannot be locked (Function not implemented)" in answer.out


@pytest.mark.parametrize("seeds", [(1, 1), (2, 2), (1, 2)])
def test_sweeps_with_one_results_file_lose_no_record(room, seeds):
  """As with two --out, on two machines: each writes what the other has found, too."""
  plans = [plan(room, seeds=number) for number in seeds]
  books = [Book(room / "results", "three", cells) for cells in plans]
  books[0].add(plans[0][0], record_of(plans[0][0]))
  books[1].add(plans[1][-1], record_of(plans[1][-1]))
  for book in books:
    book.write()
  last = plans[1][-1]
  assert results(room) == [("k=1", 0), (last.row, last.seed)]
  books[0].write()
  assert results(room) == [("k=1", 0), (last.row, last.seed)]


WRITER = """import json, pathlib, sys

from experiments.sweeps.book import Book
from experiments.sweeps.cells import Cell

results, number, record = pathlib.Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
row = f"row {number}"
cells = [Cell(f"{row} {i}", row, i, f"{row} {i}", 1, results, ()) for i in range(20)]
book = Book(results, "many", cells)
print(flush=True)
sys.stdin.readline()
for cell in cells:
  book.add(cell, record | dict(seed=cell.seed, digest=cell.digest))
  book.write()
"""


def test_writers_at_the_same_time_lose_no_record(room, request):
  record = json.dumps(record_of(plan(room)[0]))
  words = [sys.executable, "-c", WRITER, str(room / "results")]
  streams = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=request.config.rootpath)
  start = lambda number: subprocess.Popen([*words, str(number), record], **streams)
  with start(0) as one, start(1) as other:
    for writer in (one, other):
      writer.stdout.readline()  # it has looked for what is there
    for writer in (one, other):
      writer.stdin.close()
    assert (one.wait(), other.wait()) == (0, 0)
  assert sorted(results(room, "many")) == [(f"row {i}", n) for i in range(2) for n in range(20)]


# Several at once ----------------------------------------------------------------------------------


def test_cells_run_at_once_and_each_has_its_share_of_the_cores(room, swept):
  answer = swept("--parallel=2", seeds=1, do={"k-1-seed0": "meet", "k-2-seed0": "meet"})
  assert answer.status == 0, answer.err
  shares = [sorted(share) for share in local.core_shares(2)]
  first = {one["cell"]: one["cores"] for one in calls(room)}
  assert [first["k-1-seed0"], first["k-2-seed0"]] == shares
  assert first["k-4-seed0"] in shares
  assert {one["memory"] for one in calls(room)} == {"0.450"}
  assert results(room) == [("k=1", 0), ("k=2", 0), ("k=4", 0)]


def test_one_at_a_time_has_all_the_cores(room, swept):
  cores = os.sched_getaffinity(0)
  swept(seeds=1)
  assert all(one["cores"] == sorted(cores) and one["memory"] is None for one in calls(room))
  assert os.sched_getaffinity(0) == cores


@pytest.mark.parametrize(
  "number, shares",
  [
    (1, [{0, 1, 2, 3, 6}]),
    (2, [{0, 1}, {2, 3}]),
    (5, [{0}, {1}, {2}, {3}, {6}]),
    (7, [{0}, {1}, {2}, {3}, {6}, {0}, {1}]),
  ],
)
def test_shares_are_equal_and_overlap_only_where_cores_are_too_few(monkeypatch, number, shares):
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 6})
  assert local.core_shares(number) == shares


# Jobs ---------------------------------------------------------------------------------------------

CLUSTER = '''"""Takes a job and says its number."""
import json, pathlib, sys

with open(pathlib.Path(__file__).with_name("jobs.jsonl"), "a") as file:
  file.write(json.dumps(sys.argv[1:]) + "\\n")
print("job 17")
sys.exit("full" if "k-2" in sys.argv[1] else 0)
'''


@pytest.fixture
def cluster(room):
  """A template for --submit, and what it was called with."""
  (room / "cluster.py").write_text(CLUSTER)
  (room / "jobs.jsonl").touch()
  template = f"{sys.executable} {room}/cluster.py --job-name={{name}} '--wrap=time {{command}}'"
  read = lambda: [json.loads(line) for line in (room / "jobs.jsonl").read_text().splitlines()]
  return f"--submit={template}", read


def test_each_cell_is_a_job_once_and_the_sweep_again_collects(room, swept, cluster):
  submit, jobs = cluster
  answer = swept(submit, seeds=1)
  assert answer.status == 1  # one was refused
  assert [job[0] for job in jobs()] == [f"--job-name=three-{row}-seed0" for row in ROWS]
  assert "0 of 3 finished, 1 failed, 2 submitted" in answer.out
  folder = room / "runs" / "three"
  assert (folder / "k-2-seed0.error.txt").read_text() == "job 17\nfull\nexit status 1\n"
  assert (folder / "k-1-seed0.submitted").read_text() == "job 17\n"

  first = shlex.split(jobs()[0][1].removeprefix("--wrap=time "))
  subprocess.run([sys.executable, *first[1:]], check=True)  # the job, elsewhere
  assert "1 of 3 finished, 1 failed, 1 submitted" in swept(submit, seeds=1).out
  assert [job[0] for job in jobs()][3:] == ["--job-name=three-k-2-seed0"]
  assert results(room) == [("k=1", 0)]


def test_a_submitted_cell_does_not_run_here_too(room, swept, cluster):
  swept(cluster[0], seeds=1)
  swept(seeds=1)
  assert names(room) == ["k-2-seed0"]  # what the cluster refused


@pytest.mark.parametrize(
  "template, words",
  [
    ("sbatch --wrap=train", "no {command}"),
    ("sbatch {job} {command}", "'job'"),
    ("sbatch {} {command}", "{command}"),
    ("sbatch '{command}", "No closing quotation"),
    ("sbatch {command", "{command}"),
  ],
)
def test_a_template_that_is_wrong_is_refused(room, swept, template, words):
  refused(swept(f"--submit={template}"), f"--submit={template} {words} sbatch --job-name={{name}}")
  assert not (room / "runs").exists()


def test_a_cluster_that_is_not_there_is_named(swept):
  refused(swept("--submit=no_such_cluster {command}"), "--submit: cannot run no_such_cluster")


def test_a_folder_that_cannot_be_made_is_named(room, swept):
  (room / "runs").touch()
  refused(swept(), f"cannot use {room}/runs/three Not a directory --out")
  assert not calls(room) and not (room / "results").exists()


# Without running ----------------------------------------------------------------------------------


def test_a_dry_run_prints_the_commands_of_what_is_to_be_done_and_writes_nothing(
  room, swept, contents
):
  fail = {"k-4-seed1": "fail", "k-2-seed0": "fail"}
  swept(do=fail)
  before = contents(room)
  answer = swept("--dry_run", do=fail)
  assert (answer.status, answer.err) == (0, "")
  commands = [line for line in answer.out.splitlines() if line.startswith("python")]
  assert [line.rpartition("/")[2] for line in commands] == ["k-2-seed0", "k-4-seed1"]
  assert commands[0] == (
    f"python {room}/fake.py --config={room}/three.py --config.model.max_distance=2 "
    f"--config.seed=0 --workdir={room}/runs/three/k-2-seed0"
  )
  assert contents(room) == before


def test_a_dry_run_prints_jobs_that_a_shell_takes_as_they_are(room, swept, cluster):
  submit, jobs = cluster
  text = swept(submit, "--dry_run", seeds=1).out
  assert jobs() == []
  words = [shlex.split(line) for line in text.splitlines()]
  assert [line[2] for line in words] == [f"--job-name=three-{row}-seed0" for row in ROWS]
  inner = shlex.split(words[0][3].removeprefix("--wrap=time "))
  assert inner[-1] == f"--workdir={room}/runs/three/k-1-seed0"


# Bad input ----------------------------------------------------------------------------------------


def refused(answer, words: str) -> None:
  assert (answer.status, answer.err.count("\n")) == (2, 1), answer.err
  assert not [word for word in words.split() if word not in answer.err], answer.err


@pytest.mark.parametrize(
  "rows, words",
  [
    ("('a=1', {}), ('a 1', {'model.width': 8})", "two cells called a-1-seed0 'a=1' 'a 1'"),
    ("('a', {}), ('b', {'seed': 7})", "three.py row 'b' seed --config.seed --seeds"),
    ("('a', {'model.width': 64}), ('b', {'model.width': 64})", "'a' 'b' same config"),
    ("('a', {}), ('b', {'name': 'x'})", "'a' 'b' same config"),
    ("('a', {'model.widht': 64}),", "cell a-seed0 unknown config.model.widht config.model.width?"),
    ("('a', {'model.width': 'x'}),", "cell a-seed0 --config.model.width=x int"),
    ("('=', {}),", "three.py yields ('=', {}): letter"),
    ("('a', 3),", "three.py yields ('a', 3): changes"),
    ("('a', {}, {}), 'b'", "three.py yields ('a', {}, {}): changes"),
    ("'b'", "three.py yields 'b': changes"),
    ("(1 / 0, 3),", "three.py line division by zero"),
    ("", "three.py no rows"),
  ],
)
def test_rows_that_cannot_be_a_table_are_refused_before_anything_runs(room, swept, rows, words):
  text = (room / "three.py").read_text().partition("def sweep")[0]
  (room / "three.py").write_text(f"{text}def sweep():\n  yield from [{rows}]\n")
  refused(swept(), words)
  assert not calls(room) and not (room / "runs").exists() and not (room / "results").exists()


def test_a_cell_whose_config_is_not_valid_is_named(room, swept, monkeypatch):
  monkeypatch.undo()
  monkeypatch.setattr(cells_module, "TRAIN", ("python", str(room / "fake.py")))
  text = (room / "three.py").read_text().replace("(1, 2, 4)", "(1, -2)")
  (room / "three.py").write_text(text)
  refused(swept(), "cell k-2-seed0 config.model.max_distance is -2 at least 0")
  assert not calls(room)


@pytest.mark.parametrize("value", [8, 16])
def test_a_change_that_every_row_overrides_is_refused(room, swept, value):
  """A value that is the config's own is asked for, too."""
  change = f"--config.model.max_distance={value}"
  words = f"--config.model.max_distance no cell {room}/three.py leave sweep()"
  refused(swept(change, "--dry_run"), words)


def test_a_change_that_some_rows_override_holds_in_the_others(room, swept):
  (room / "three.py").write_text((room / "three.py").read_text() + "  yield 'own', {}\n")
  answer = swept("--config.model.max_distance=8", "--dry_run", seeds=1)
  told = [re.search("max_distance=([0-9]+)", line)[1] for line in answer.out.splitlines()]
  assert (answer.status, told) == (0, ["1", "2", "4", "8"])


def test_a_last_seed_that_is_none_is_refused(room, swept, monkeypatch):
  monkeypatch.setattr(cells_module, "validate", validate)
  change = f"--config.seed={2**32 - 1}"
  assert swept(change, "--dry_run", seeds=1).status == 0
  refused(swept(change, "--dry_run", seeds=2), f"-seed{2**32} config.seed is {2**32} 2**32 - 1")


def test_a_name_that_no_folder_can_have_is_refused(room, swept):
  refused(swept("--config.name=***"), "config.name is '***' letter --config.name")
  assert not (room / "runs").exists() and not (room / "results").exists()


def test_a_config_without_a_sweep_is_named(room, swept):
  text = (room / "three.py").read_text().partition("def sweep")[0]
  (room / "three.py").write_text(text)
  refused(swept(), "three.py has no sweep() configs/table1.py")


@pytest.mark.parametrize("flag", ["--seeds=0", "--parallel=0"])
def test_numbers_below_one_are_refused(swept, flag):
  refused(swept(flag), f"{flag}: give at least 1")


@pytest.mark.parametrize("file", ["three", "another"])
def test_a_half_written_results_file_is_refused_and_kept(room, swept, contents, file):
  swept(seeds=1)
  path = room / "results" / f"{file}.jsonl"
  path.write_text((room / "results" / "three.jsonl").read_text()[:-50])
  before = contents(room)
  refused(swept(seeds=2), f"{path}, line 3: half-written")
  assert contents(room) == before


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(), "two records of 'k=1', seed 0"),
    (dict(row="k=4", digest="0123456789ab"), "'k=4', seed 0, of another config 0123456789ab"),
  ],
)
def test_records_that_contradict_the_sweep_are_refused_and_kept(
  room, swept, contents, changes, words
):
  swept(seeds=1)
  path = room / "results" / "three.jsonl"
  lines = path.read_text().splitlines()
  first = json.dumps(json.loads(lines[0]) | changes)
  path.write_text("".join(f"{line}\n" for line in (*lines[:2], first)))
  before = contents(room)
  refused(swept(seeds=1), f"{path} {words}")
  assert contents(room) == before


# Real trainings -----------------------------------------------------------------------------------


@pytest.fixture
def tiny_sweep(data, tmp_path, monkeypatch, request):
  """The tiny config as a sweep of one row."""
  monkeypatch.chdir(request.config.rootpath)
  file = tmp_path / "tiny.py"
  text = (data / "tiny.py").read_text().replace("pathlib.Path(__file__).parent", f"{str(data)!r}")
  file.write_text(text + "\n\ndef sweep():\n  yield 'k=2', {'model.max_distance': 2}\n")
  return file


def test_a_training_is_finished_for_the_sweep_that_would_have_started_it(
  call, tiny_sweep, workdir, tmp_path
):
  """Both know it by the same digest."""
  cell = tmp_path / "runs" / "tiny" / "k-2-seed0"
  shutil.copytree(workdir, cell)
  folders = f"--out={tmp_path}/runs", f"--results={tmp_path}/results"
  answer = call("sweep", f"--config={tiny_sweep}", "--seeds=1", *folders)
  assert answer.status == 0 and "1 of 1 finished" in answer.out, answer.err
  (record,) = read_records(tmp_path / "results" / "tiny.jsonl")
  assert (record["sweep"], record["row"], record["seed"]) == ("tiny", "k=2", 0)
  assert not cell.with_name("k-2-seed0.log").exists()


def test_the_commands_are_those_of_trainings_with_the_cells_configs(call, tiny_sweep, tmp_path):
  answer = call("sweep", f"--config={tiny_sweep}", "--dry_run", f"--out={tmp_path}/runs")
  lines = answer.out.splitlines()
  assert len(lines) == 3 and not (tmp_path / "runs").exists()
  for seed, line in enumerate(lines):
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "experiments.train"]
    values = command.parse(train.FLAGS, words[3:])
    assert (values["config"].seed, values["config"].model.max_distance) == (seed, 2)
    assert values["workdir"] == f"{tmp_path}/runs/tiny/k-2-seed{seed}"
    file = command.parse(dict(config=command.SWEEP), [f"--config={tiny_sweep}"])["config"]
    cell = plan_cells(file, 3, tmp_path / "runs")[seed]
    assert digest(changes(values["config"], default.get_config())) == cell.digest


def test_the_sweep_itself_stays_off_the_accelerator_and_a_cell_may_ask_for_many_devices(tiny_sweep):
  """In a process of its own: devices are chosen once."""
  text = tiny_sweep.read_text().partition("def sweep")[0]
  rows = ("one", {}), ("two", {"mesh.tensor": 2})
  tiny_sweep.write_text(f"{text}def sweep():\n  yield from {rows}\n")
  code = (
    "import jax, sys; from experiments import command, sweep\n"
    "try: command.run(sweep.main, sweep.FLAGS, sys.argv[1:])\n"
    "except SystemExit as end: print(end.code, jax.default_backend(), jax.device_count())"
  )
  changes = "--config.mesh.data=3", "--config.batches.tokens=270"
  variables = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
  answer = subprocess.run(
    [sys.executable, "-c", code, f"--config={tiny_sweep}", "--dry_run", *changes],
    capture_output=True,
    text=True,
    env=variables | dict(PYTHONPATH=str(pathlib.Path(__file__).parents[2])),
  )
  assert answer.stdout.splitlines()[-1] == "0 cpu 1", answer.stderr
  assert len(re.findall("^python -m experiments.train ", answer.stdout, re.MULTILINE)) == 6
