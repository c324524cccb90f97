"""Runs commands as a user does; one tiny training is for all of their tests."""

import contextlib
import functools
import hashlib
import importlib
import io
import itertools
import pathlib
import random
import shutil
import sys
from typing import NamedTuple
from unittest import mock

import jax
import pytest
from faults import read_step
from jax.experimental.compilation_cache import compilation_cache

from experiments import command
from experiments.training.checkpoint_reader import local_copy

CONFIG_FILE = '''"""A model that compiles quickly and learns little."""

import pathlib

from configs import default

_DATA = pathlib.Path(__file__).parent


def get_config():
  config = default.get_config()
  config.name = "tiny"
  config.data.source = "pairs"
  for split in ("train", "valid", "test"):
    config.data.pairs[split] = f"{_DATA}/{split}.en,{_DATA}/{split}.de"
  config.vocabulary.size = 400
  config.batches.update(tokens=128, max_length=16, num_shapes=1)
  config.model.update(num_layers=1, width=16, num_heads=2, feed_forward=16)
  config.model.max_distance = 2
  config.model.tables_per_head = False  # as translators that are exported have them
  config.training.update(schedule="inverse_sqrt", learning_rate=0.01, warmup_steps=4)
  config.training.num_steps = 15
  config.training.update(eval_every=6, save_every=3, keep_checkpoints=3, num_samples=2)
  config.mesh.data = 1
  config.decoding.update(beam_size=2, extra_length=4, average_checkpoints=3)
  return config
'''

ENGLISH = (
  ("the dog", "the cat", "a man", "a child"),
  ("sees", "hears", "finds", "likes"),
  ("the house", "a tree", "the small ball", "the old green bike"),
)
GERMAN = (
  ("der Hund", "die Katze", "ein Mann", "ein Kind"),
  ("sieht", "hört", "findet", "mag"),
  ("das Haus", "einen Baum", "den kleinen Ball", "das alte grüne Rad"),
)


class Answer(NamedTuple):
  """Exit status and streams of a command, and the names of what it compiled."""

  status: int
  out: str
  err: str
  compiled: list[str]

  def assert_refused(self, words: str) -> None:
    """Raises AssertionError unless the answer is one line with these words."""
    assert (self.status, self.err.count("\n"), self.compiled) == (2, 1, []), self.err
    assert [word for word in words.split() if word not in self.err] == [], self.err


@pytest.fixture(scope="session")
def fast(tmp_path_factory):
  """Returns a context that compiles with little effort, and each program once."""
  changes = {
    "jax_disable_most_optimizations": True,
    "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
  }

  def configure(values) -> None:
    for name, value in values.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()

  @contextlib.contextmanager
  def fast():
    before = {name: jax.config.values[name] for name in changes}
    configure(changes)
    try:
      yield
    finally:
      configure(before)

  return fast


@pytest.fixture(scope="session")
def call(fast):
  """Runs a command, such as call("train", "--config=..."), as its own process would."""
  compiled = []

  def listen(event: str, seconds: float, fun_name: str = "", **_) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
      compiled.append(fun_name)

  jax.monitoring.register_event_duration_secs_listener(listen)

  def call(name: str, *arguments: str, stdin: bytes = b"") -> Answer:
    module = importlib.import_module(f"experiments.{name}")
    run = getattr(module, "run", None)  # of a command with sub-commands
    if run is None:
      run = functools.partial(command.run, module.main, module.FLAGS)
    source, out, err = (
      io.TextIOWrapper(io.BytesIO(text), newline="\n") for text in (stdin, b"", b"")
    )
    compiled.clear()
    with (
      fast(),
      mock.patch.object(sys, "stdin", source),
      contextlib.redirect_stdout(out),
      contextlib.redirect_stderr(err),
      pytest.raises(SystemExit) as exit,
    ):
      run(arguments)
    status = exit.value.code
    if isinstance(status, str):  # as Python ends a process
      print(status, file=err)
      status = 1
    return Answer(status, written(out), written(err), [*compiled])

  return call


def written(stream: io.TextIOWrapper) -> str:
  stream.flush()
  return stream.buffer.getvalue().decode()


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> pathlib.Path:
  """Writes files of 64 sentence pairs, one of them half empty, and a config."""
  folder = tmp_path_factory.mktemp("data")
  words = zip(itertools.product(*ENGLISH), itertools.product(*GERMAN), strict=True)
  pairs = [(f"{' '.join(x)}.", f"{' '.join(y)}.") for x, y in words]
  random.Random(0).shuffle(pairs)
  train = [*pairs[:52], ("nothing", "")]
  splits = {"train": train, "valid": pairs[52:58], "test": pairs[58:]}
  for split, rows in splits.items():
    for side, language in enumerate(("en", "de")):
      text = "".join(f"{row[side]}\n" for row in rows)
      (folder / f"{split}.{language}").write_text(text, encoding="utf-8")
  (folder / "tiny.py").write_text(CONFIG_FILE)
  return folder


@pytest.fixture(scope="session")
def trainer(call):
  """Runs train: trainer("FILE.py", "seed=1")(workdir, "--config.seed=2")."""

  def trainer(config: str, *values: str):
    flags = [f"--config={config}", *(f"--config.{value}" for value in values)]

    def train(workdir, *changes: str) -> Answer:
      return call("train", f"--workdir={workdir}", *flags, *changes)

    return train

  return trainer


@pytest.fixture(scope="session")
def train(trainer, data):
  return trainer(f"{data}/tiny.py")


@pytest.fixture(scope="session")
def finish(tmp_path_factory):
  """Trains in a new folder: finish(train, "--config.seed=2")."""

  def finish(train, *changes: str) -> tuple[pathlib.Path, Answer]:
    workdir = tmp_path_factory.mktemp("runs") / "deep" / "trained"
    answer = train(workdir, *changes)
    assert answer.status == 0, answer.err
    return workdir, answer

  return finish


@pytest.fixture(scope="session")
def training(train, finish) -> tuple[pathlib.Path, Answer]:
  """Returns a finished run's folder, read-only, and the command's answer."""
  return finish(train)


@pytest.fixture(scope="session")
def workdir(training) -> pathlib.Path:
  """Returns the folder of a finished run; it averages steps 12 and 15."""
  return training[0]


@pytest.fixture
def run_copy(workdir, tmp_path) -> pathlib.Path:
  """Copies a finished run's folder, with checkpoints 9, 12 and 15, to change it."""
  return shutil.copytree(workdir, tmp_path / "run")


@pytest.fixture(scope="session")
def parameters():
  """Reads the parameters of a run at a step: parameters(workdir, 15)."""

  def parameters(workdir: pathlib.Path, step: int):
    with local_copy(workdir / "checkpoints" / str(step)) as folder:
      arrays = sorted(read_step(folder).items())
    return [array for name, array in arrays if name.startswith("params.")]

  return parameters


@pytest.fixture
def check_evaluate(call):
  """Returns a function that checks that evaluate repeats the scores of a run."""

  def check_evaluate(workdir: pathlib.Path) -> None:
    before = (workdir / "results.json").read_text()
    answer = call("evaluate", f"--workdir={workdir}")
    assert (answer.status, answer.err) == (0, "")
    assert (workdir / "results.json").read_text() == before

  return check_evaluate


@pytest.fixture(scope="session")
def contents():
  """Returns every path in a folder, with a digest if it is a file."""

  def contents(folder: pathlib.Path) -> dict[str, str]:
    digests = {}
    for path in sorted(folder.rglob("*")):
      name = str(path.relative_to(folder))
      digests[name] = ""
      if path.is_file():
        digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests

  return contents
