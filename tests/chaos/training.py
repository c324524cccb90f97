"""Starts small trainings in subprocesses, and compares them with an undisturbed one."""

import contextlib
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

from chaos.run import Run, digests, metrics
from experiments.launch import dying_with_this_process
from experiments.launch.__main__ import environments
from experiments.training.checkpoint_reader import list_steps
from experiments.translation.corpus import load_embedded

ROOT = pathlib.Path(__file__).parents[2]
DISTURBED = (str(pathlib.Path(__file__).with_name("disturbed.py")),)
NUM_STEPS, SAVE_EVERY = 100, 20

_TRAIN = ("-m", "experiments.train")
_CHANGES = f"""
vocabulary.size=400 batches.tokens=256 batches.max_length=32 batches.num_shapes=1
model.num_layers=1 model.width=32 model.num_heads=2 model.feed_forward=32 model.max_distance=4
training.num_steps={NUM_STEPS} training.save_every={SAVE_EVERY} training.eval_every={NUM_STEPS}
training.keep_checkpoints=3 training.num_samples=2 decoding.beam_size=1 decoding.extra_length=4
mesh.data=-1
"""
# Lines of stderr that show progress.
_PROGRESS = re.compile(r"compiling |step \d+/\d+  loss |step \d+  valid_loss |\d+/\d+ .* a second")


class Training:
  """The command `experiments.train` with a model of one layer and 400 sentence pairs.

  Keeps compiled programs in its folder: each start but the first takes seconds.
  """

  def __init__(self, folder: pathlib.Path):
    self._folder = folder
    self._logs = itertools.count()
    self._undisturbed: dict[tuple, pathlib.Path] = {}
    corpus = load_embedded(train_size=400)
    for split, number in (("train", 400), ("valid", 8)):
      lines = ("\t".join(pair) + "\n" for pair in corpus.splits[split][:number])
      (folder / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")

  def words(self, workdir: str | os.PathLike, *flags: str) -> list[str]:
    pairs = [f"--config.data.pairs.{name}={self._folder}/{name}.tsv" for name in ("train", "valid")]
    changes = [f"--config.{change}" for change in _CHANGES.split()]
    config = [f"--config={ROOT}/configs/quickstart.py", "--config.data.source=pairs"]
    return [*config, *pairs, *changes, f"--workdir={workdir}", *flags]

  def env(self, devices: int = 1) -> dict[str, str]:
    """Returns the environment of a process with so many simulated devices."""
    return os.environ | dict(
      JAX_COMPILATION_CACHE_DIR=str(self._folder / "compiled"),
      JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
      JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
      JAX_PLATFORMS="cpu",
      JAX_NUM_CPU_DEVICES=str(devices),
      PYTHONPATH=str(ROOT),
    )

  @contextlib.contextmanager
  def started(
    self, workdir, *flags, processes=1, program=_TRAIN, launcher=(), devices=1
  ) -> Iterator[Run]:
    """Starts the training, several processes as on a cluster; kills what is left at the end."""
    run = Run(workdir, self._folder / f"log-{next(self._logs)}", bool(launcher))
    words = [*dying_with_this_process(), sys.executable, *launcher]
    words += [*program, *self.words(workdir, *flags)]
    envs = [self.env(devices)] if launcher else environments(processes, self.env())
    with contextlib.ExitStack() as stack:
      opened = lambda suffix: stack.enter_context(open(run.log.with_suffix(suffix), "w"))
      streams = dict(stdout=opened(".out"), stderr=opened(".err"))
      for env in envs:
        run.processes.append(subprocess.Popen(words, env=env, cwd=ROOT, **streams))
        stack.callback(run.processes[-1].wait)
        stack.callback(run.processes[-1].kill)
      yield run

  def launched(self, workdir, *flags: str, processes=1, retries=0, **how):
    """Starts the training by `experiments.launch`."""
    launcher = ["-m", "experiments.launch", f"--processes={processes}", f"--retries={retries}"]
    launcher += ["--", sys.executable]
    return self.started(workdir, *flags, processes=processes, launcher=launcher, **how)

  def to_its_end(self, workdir: pathlib.Path, *flags: str, **how) -> list[str]:
    """Trains to the end, which must equal that of the undisturbed run; returns the messages."""
    processes = how.get("processes", 1)
    with (self.launched if processes > 1 else self.started)(workdir, *flags, **how) as run:
      assert run.wait() == 0, run.err()
    self.check_end(workdir, *flags, processes=processes)
    return self.messages(run)

  def check_end(self, workdir: pathlib.Path, *flags: str, processes: int = 1) -> None:
    """Asserts that metrics and final state are those of the undisturbed run, and the steps kept."""
    other = self.undisturbed(*flags, processes=processes)
    steps, wanted = (list_steps(run / "checkpoints") for run in (workdir, other))
    assert steps == wanted, "other checkpoints are kept, and averaged"
    assert digests(workdir, NUM_STEPS) == digests(other, NUM_STEPS), "the final states differ"
    assert metrics(workdir) == metrics(other), "the metrics differ"

  def messages(self, run: Run) -> list[str]:
    """Returns all lines of stderr but the progress and the sample translations."""
    file = run.workdir / "samples.txt"
    usual = {"", *(file.read_text(encoding="utf-8") if file.exists() else "").splitlines()}
    return [
      line for line in run.err().splitlines() if line not in usual and not _PROGRESS.match(line)
    ]

  def undisturbed(self, *flags: str, processes: int = 1) -> pathlib.Path:
    """Returns the folder of an undisturbed training, saved at steps 60, 80 and 100."""
    key = (processes, *flags)
    if key not in self._undisturbed:
      workdir = self._folder / f"undisturbed-{len(self._undisturbed)}"
      with self.launched(workdir, *flags, processes=processes) as run:
        assert run.wait() == 0, run.err()
      assert processes > 1 or self.messages(run) == []
      self._undisturbed[key] = workdir
    return self._undisturbed[key]

  def copy(self, workdir: pathlib.Path) -> pathlib.Path:
    shutil.rmtree(workdir, ignore_errors=True)
    return shutil.copytree(self.undisturbed(), workdir)
