"""The training that faults are done to: tiny, real, and the same each time if nothing happens."""

import contextlib
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.launch.__main__ import dying_with_this_process, environments
from relpos_jax.data.corpus import load_corpus
from relpos_jax.training import shelf
from relpos_jax.training.manifest import Damage
from relpos_jax.training.reading import Reader
from relpos_jax.training.reporting import read_metrics

NUM_STEPS, SAVE_EVERY = 100, 20
ENDLESS = 999  # so often may a launcher start it again

_ROOT = pathlib.Path(__file__).parents[2]
_PATIENCE = 300.0  # seconds; what has not come by then does not come
_OF_TIME = ("time", "tokens_per_second")
_CHANGES = dict(
  vocabulary=dict(size=400),
  batches=dict(tokens=256, max_length=32, num_shapes=1),
  model=dict(num_layers=1, width=32, num_heads=2, feed_forward=32, max_distance=4),
  training=dict(
    num_steps=NUM_STEPS,
    save_every=SAVE_EVERY,
    eval_every=NUM_STEPS,
    keep_checkpoints=3,
    num_samples=2,
  ),
  decoding=dict(beam_size=1, extra_length=4),
  mesh=dict(data=-1),
)


class Try(NamedTuple):
  """A fault that was done, and what came of it."""

  what: str  # was done
  problem: str = ""  # that should not be; empty: all held
  figures: Mapping[str, float] = {}  # what was measured, by name; the larger the worse
  number: int = 1  # of faults; 0: only what those before have led to was looked at


class Subject:
  """The command `experiments.train` on some pairs of the embedded corpus, in a folder of its own.

  What it compiles is kept in that folder, so that to start it again costs little.
  """

  def __init__(self, folder: pathlib.Path):
    """Writes the pairs into the folder, which exists."""
    self.folder = folder
    self._lock = threading.Lock()
    self._outcomes: dict[int, Outcome] = {}
    corpus = load_corpus("embedded", train_size=400)
    for split, number in (("train", 400), ("valid", 8)):
      lines = ("\t".join(pair) + "\n" for pair in corpus.splits[split][:number])
      self._pairs(split).write_text("".join(lines), encoding="utf-8")

  def _pairs(self, split: str) -> pathlib.Path:
    return self.folder / f"{split}.tsv"

  def words(self, workdir: pathlib.Path, *flags: str, program: str = "train") -> list[str]:
    """The command, with flags that change it."""
    pairs = [f"--config.data.pairs.{split}={self._pairs(split)}" for split in ("train", "valid")]
    changes = [
      f"--config.{group}.{key}={value}"
      for group, values in _CHANGES.items()
      for key, value in values.items()
    ]
    start = [sys.executable, "-m", f"experiments.{program}", "--config=configs/quickstart.py"]
    return [*start, "--config.data.source=pairs", *pairs, *changes, f"--workdir={workdir}", *flags]

  def env(self, devices: int = 1) -> dict[str, str]:
    """The environment of the command, on so many simulated devices a process."""
    cache = dict(
      JAX_COMPILATION_CACHE_DIR=str(self.folder / "compiled"),
      JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
      JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    return os.environ | cache | dict(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(devices))

  @contextlib.contextmanager
  def launched(
    self,
    workdir: pathlib.Path,
    *flags: str,
    processes: int = 1,
    retries: int = 0,
    devices: int = 1,
    program: str = "train",
  ) -> Iterator["Running"]:
    """Started by `experiments.launch`; nothing of it is left at the end."""
    start = [sys.executable, "-m", "experiments.launch"]
    start += [f"--processes={processes}", f"--retries={retries}", "--"]
    words = start + self.words(workdir, *flags, program=program)
    with _started(words, self.env(devices), workdir) as launcher:
      yield Running(workdir, [launcher], has_launcher=True)

  @contextlib.contextmanager
  def alone(self, workdir: pathlib.Path, processes: int) -> Iterator["Running"]:
    """Without a launcher, as the processes of a cluster: none but they see that one dies."""
    with contextlib.ExitStack() as stack:
      start = lambda env: stack.enter_context(_started(self.words(workdir), env, workdir))
      children = [start(env) for env in environments(processes, self.env())]
      yield Running(workdir, children, has_launcher=False)

  def undisturbed(self, processes: int = 1) -> "Outcome":
    """What it comes to if nothing happens to it."""
    with self._lock:
      if processes not in self._outcomes:
        self._outcomes[processes] = self._left_alone(processes)
      return self._outcomes[processes]

  def _left_alone(self, processes: int) -> "Outcome":
    workdir = self.workdir_undisturbed(processes)
    with self.launched(workdir, processes=processes) as running:
      if running.wait():
        raise RuntimeError(f"the undisturbed training failed:\n{running.log()}")
    return outcome(workdir)

  def workdir_undisturbed(self, processes: int = 1) -> pathlib.Path:
    """The folder of that run."""
    return self.folder / f"undisturbed-{processes}"


class Running:
  """A command under way, in one process or several."""

  def __init__(
    self, workdir: pathlib.Path, started: Sequence[subprocess.Popen], has_launcher: bool
  ):
    """`started`: the launcher, or the processes themselves."""
    self.workdir, self.started, self._has_launcher = workdir, started, has_launcher
    self.since = time.time()

  def pids(self) -> list[int]:
    """Those of the training, in order of their start."""
    if self._has_launcher:
      return _children(self.started[0].pid)
    return [process.pid for process in self.started if process.poll() is None]

  def is_over(self) -> bool:
    """Whether all have ended."""
    return all(process.poll() is not None for process in self.started)

  def wait(self, seconds: float = _PATIENCE) -> int:
    """Waits for the end; the exit status of the first that was started."""
    if not wait_until(self.is_over, seconds):
      raise TimeoutError(f"{self.workdir} has not ended in {seconds:.0f} s:\n{self.log()}")
    return self.started[0].returncode

  def wait_for(self, condition: Callable[[], Any]) -> bool:
    """Waits until something is true, or this has ended; returns whether it is true."""
    wait_until(lambda: condition() or self.is_over(), _PATIENCE)
    return not self.is_over()

  def wait_seconds(self, seconds: float) -> bool:
    """Waits so long, or until this has ended; returns whether it is there still."""
    end = time.time() + seconds
    return self.wait_for(lambda: time.time() > end)

  def is_training(self) -> bool:
    """Whether it is about to make its first step since `since`, or has."""
    return _is_since(self.workdir / "environment.json", self.since)

  def has_stepped(self) -> bool:
    """Whether it has made steps since `since`."""
    return _is_since(self.workdir / "metrics.jsonl", self.since)

  def is_saving(self) -> bool:
    """Whether a save that began since `since` goes on."""
    if not self.is_training():  # What a kill left behind is deleted before.
      return False
    unfinished = shelf.unfinished(self.workdir / "checkpoints")
    return any(_is_since(path, self.since) for path in unfinished)

  def log(self) -> str:
    """What it said, and those before it in this folder."""
    return _log_file(self.workdir).read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def _started(words, env, workdir: pathlib.Path) -> Iterator[subprocess.Popen]:
  with open(_log_file(workdir), "a", encoding="utf-8") as log:
    process = subprocess.Popen(
      [*dying_with_this_process(), *words], env=env, cwd=_ROOT, stdout=log, stderr=subprocess.STDOUT
    )
  try:
    yield process
  finally:
    process.kill()
    process.wait()


def _log_file(workdir: pathlib.Path) -> pathlib.Path:
  return workdir.with_name(f"{workdir.name}.log")


def _is_since(path: pathlib.Path, since: float) -> bool:
  try:
    return path.stat().st_mtime > since
  except FileNotFoundError:
    return False


def _children(pid: int) -> list[int]:
  """The processes that a process has started and that live."""
  found = []
  for file in pathlib.Path("/proc").glob("[0-9]*/stat"):
    with contextlib.suppress(OSError):  # it has ended
      state, parent = file.read_text().rpartition(")")[2].split()[:2]
      if int(parent) == pid and state != "Z":
        found.append(int(file.parent.name))
  return sorted(found)


def is_alive(pid: int) -> bool:
  """Whether a process is there and has not ended."""
  try:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
  except OSError:
    return False


def wait_until(condition: Callable[[], Any], seconds: float) -> bool:
  """Looks a hundred times a second whether something is true; returns whether it came to be."""
  deadline = time.monotonic() + seconds
  while not condition():
    if time.monotonic() > deadline:
      return False
    time.sleep(0.01)
  return True


# What a run leaves -------------------------------------------------------------------------------


class Outcome(NamedTuple):
  """All that a run has computed: its metrics, and the digests of its last state."""

  metrics: list[dict[str, Any]]
  digests: dict[str, str]


def outcome(workdir: pathlib.Path) -> Outcome:
  """Reads all of the last state.

  Raises:
    Damage: it is.
  """
  return Outcome(metrics(workdir), digests(workdir, kept(workdir)))


def metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """The lines of metrics.jsonl without what depends on time."""
  return [{k: v for k, v in line.items() if k not in _OF_TIME} for line in read_metrics(workdir)]


def digests(workdir: pathlib.Path, step: int) -> dict[str, str]:
  """Of every array of a checkpoint, by name, once it was found to be what was saved."""
  reader = Reader(workdir / "checkpoints")
  reader.examine(step)
  return {name: entry.digest for name, entry in reader.entries(step).items()}


def state_digests(workdir: pathlib.Path, step: int) -> dict[str, str]:
  """`digests` without that of the step's own number."""
  return {name: digest for name, digest in digests(workdir, step).items() if name != "step"}


def damage(workdir: pathlib.Path, step: int) -> str:
  """What is damaged of a checkpoint; empty if nothing is, or the step is 0: none is saved."""
  try:
    if step:
      digests(workdir, step)
  except Damage as found:
    return f"step {step} is damaged: {found}"
  return ""


def reached(workdir: pathlib.Path) -> int:
  """The last step that was reported; 0 if none was."""
  return max((line["step"] for line in read_metrics(workdir) if "loss" in line), default=0)


def kept(workdir: pathlib.Path) -> int:
  """The last step that is saved; 0 if none is."""
  return max(shelf.numbered(workdir / "checkpoints"), default=0)


def difference(workdir: pathlib.Path, wanted: Outcome) -> str:
  """What of a run is not as it would have been; empty if all of it is, to the last bit."""
  try:
    found = outcome(workdir)
  except Damage as damage:
    return f"the last checkpoint is damaged: {damage}"
  if found.digests != wanted.digests:
    return "the final state is another than that of the undisturbed run"
  if found.metrics != wanted.metrics:
    return "metrics are others than those of the undisturbed run"
  return ""


def until_done(
  subject: Subject,
  name: str,
  tries: int,
  wanted: Outcome,
  disturb: Callable[[pathlib.Path, int], Iterator[Try]],
) -> Iterator[Try]:
  """Disturbs runs, each until it has reached its end in spite of it, and compares the ends.

  `disturb(workdir, most)`: a run to its end, with at most so many faults.
  """
  done = 0
  for number in range(tries):
    workdir = subject.folder / f"{name}-{number}"
    for each in disturb(workdir, tries - done):
      done += each.number
      yield each
    aside = ", ".join(path.name for path in shelf.aside(workdir / "checkpoints"))
    problems = {difference(workdir, wanted): True, f"set aside: {aside}": bool(aside)}
    yield Try(f"the end of {workdir.name}", joined(problems), number=0)
    if done == tries:
      return
  raise RuntimeError(f"{tries} runs of {name} were over before {tries} faults could be done")


def joined(problems: Mapping[str, bool]) -> str:
  """Those that are there.

  >>> joined({"late": False, "status 3": True, "no checkpoint": True})
  'status 3; no checkpoint'
  """
  return "; ".join(text for text, is_there in problems.items() if text and is_there)
