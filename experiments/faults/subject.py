"""The training that faults are done to: tiny, real, and the same each time if nothing happens."""

import contextlib
import os
import pathlib
import sys
import threading
from collections.abc import Iterator

from experiments.faults.outcome import Outcome, outcome_of
from experiments.faults.running import Running, started
from experiments.launch.__main__ import environments
from relpos_jax.data.corpus import load_corpus

NUM_STEPS, SAVE_EVERY = 100, 20

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
  ) -> Iterator[Running]:
    """Started by `experiments.launch`; nothing of it is left at the end."""
    start = [sys.executable, "-m", "experiments.launch"]
    start += [f"--processes={processes}", f"--retries={retries}", "--"]
    words = start + self.words(workdir, *flags, program=program)
    with started(words, self.env(devices), workdir) as launcher:
      yield Running(workdir, [launcher], has_launcher=True)

  @contextlib.contextmanager
  def alone(self, workdir: pathlib.Path, processes: int) -> Iterator[Running]:
    """Without a launcher, as the processes of a cluster: none but they see that one dies."""
    with contextlib.ExitStack() as stack:
      start = lambda env: stack.enter_context(started(self.words(workdir), env, workdir))
      children = [start(env) for env in environments(processes, self.env())]
      yield Running(workdir, children, has_launcher=False)

  def undisturbed(self, processes: int = 1) -> Outcome:
    """What it comes to if nothing happens to it."""
    with self._lock:
      if processes not in self._outcomes:
        self._outcomes[processes] = self._left_alone(processes)
      return self._outcomes[processes]

  def _left_alone(self, processes: int) -> Outcome:
    workdir = self.workdir_undisturbed(processes)
    with self.launched(workdir, processes=processes) as running:
      if running.wait():
        raise RuntimeError(f"the undisturbed training failed:\n{running.log()}")
    return outcome_of(workdir)

  def workdir_undisturbed(self, processes: int = 1) -> pathlib.Path:
    """The folder of that run."""
    return self.folder / f"undisturbed-{processes}"
