"""Tests flags, help, one-line errors and locks."""

import contextlib
import errno
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from experiments import command
from experiments.errors import InputError

FLAGS = dict(
  config=command.CONFIG,
  workdir=command.Flag("runs/latest", "the run's folder"),
  beam_size=command.Flag(4, "hypotheses kept"),
  penalty=command.Flag(0.6, "of length"),
  plot=command.Flag(False, "draw the attention"),
)

ROOT = pathlib.Path(__file__).parents[2]
FULL = "No space left on device): free disk space and run the same command again"

CONFIG_FILE = '''"""A small model.

More about it.
"""

from ml_collections import ConfigDict


def get_config(size="small"):
  if size not in ("small", "large"):
    raise ValueError(f"unknown argument {size!r}: use small or large")
  width = dict(small=8, large=64)[size]
  model = dict(width=width, relative=True, rate=0.1, layers=(1, 2), norm="pre")
  return ConfigDict(dict(seed=0, model=model, extra=dict()))


def sweep():
  yield "a", {}
'''


@pytest.fixture
def config_file(tmp_path, monkeypatch):
  """Replaces the project's configs by one file, `configs/small.py`."""
  folder = tmp_path / "configs"
  folder.mkdir()
  (folder / "small.py").write_text(CONFIG_FILE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(command, "_CONFIGS", folder)
  return "configs/small.py"


def run(capsys, main, *argv, flags=FLAGS):
  with pytest.raises(SystemExit) as exit:
    command.run(main, flags, argv)
  return exit.value.code, *capsys.readouterr()


def run_python(code: str, *words: str, path=ROOT, **options):
  """Runs code as a program; by default keeps what it prints."""
  options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
  env = options.pop("env", os.environ) | {"PYTHONPATH": str(path)}
  return subprocess.run(
    [sys.executable, "-c", code, *words], env=env, text=True, **options
  )


@contextlib.contextmanager
def closed_pipe():
  """Yields a file that nobody reads."""
  reader, writer = os.pipe()
  os.close(reader)
  yield writer
  os.close(writer)


def never(**_):
  pytest.fail("the command ran")


def test_main_gets_the_flags_by_name_and_the_config_with_its_changes(
  capsys, config_file
):
  calls = []
  arguments = (
    "--config.model.width",  # in two words, and before the file
    "3",
    f"--config={config_file}:large",
    "--config.model.rate=1",
    "--config.model.layers=(3, 4, 5)",
    "--noconfig.model.relative",
    "--beam_size=1",
    "--plot",
  )
  assert run(capsys, lambda **x: calls.append(x), *arguments) == (0, "", "")
  (values,) = calls
  config = values.pop("config")
  assert values == dict(workdir="runs/latest", beam_size=1, penalty=0.6, plot=True)
  model = dict(width=3, relative=False, rate=1.0, layers=(3, 4, 5), norm="pre")
  assert config.to_dict() == dict(seed=0, model=model, extra={})


# Programs of their own
# --------------------------------------------------------------------------------------


def test_a_second_command_finds_the_programs_that_the_first_compiled(tmp_path):
  code = """
import contextlib
import jax
from experiments import command
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))

def main():
  jax.jit(lambda x: x + 1)(1.0)
  print(any("cache_hits" in event for event in events))

for _ in range(2):
  events.clear()
  jax.clear_caches()
  with contextlib.suppress(SystemExit):
    command.run(main, {}, [])
"""
  env = os.environ | {"HOME": str(tmp_path)}
  del env["JAX_ENABLE_COMPILATION_CACHE"]
  assert run_python(code, env=env, check=True).stdout == "False\nTrue\n"
  assert [*tmp_path.glob(".cache/relpos_jax/*")]


PRINTS = """
import os, sys
from experiments import command

def main(kill):
  print(1, file=sys.stderr)
  print(2)
  if kill:
    os.kill(os.getpid(), 9)

command.run(main, dict(kill=command.Flag(False, "")), sys.argv[1:])
"""


@pytest.mark.parametrize(
  "word, closed, answer",
  [
    ("--kill", None, ("2\n", "1\n", -9)),  # a killed command has printed all lines
    ("--nokill", "stderr", ("2\n", None, 0)),
    ("--nokill", "stdout", (None, "1\n", 141)),
    ("--help", "stdout", (None, "", 141)),
  ],
)
def test_a_command_prints_all_lines_and_ends_quietly_where_nobody_reads_them(
  word, closed, answer
):
  with closed_pipe() as pipe:
    found = run_python(PRINTS, word, **({closed: pipe} if closed else {}))
  assert (found.stdout, found.stderr, found.returncode) == answer


# Mistakes
# --------------------------------------------------------------------------------------


WRONG_KEY = "unknown config.model.widht config.model.width?"


@pytest.mark.parametrize(
  "arguments, words",
  [
    ("--config=F --config.model.widht=3", WRONG_KEY),
    ("--config=F --config.model.width=3.5", "--config.model.width=3.5 int"),
    ("--config=F --config.model.width", "Missing value --config.model.width"),
    ("--config=F --wrokdir=a", "Unknown wrokdir workdir --help"),
    ("--config=F runs/a", "unexpected argument 'runs/a' --name=value"),
    ("", "missing --config: FILE.py configs/small.py"),
    ("--config", "missing --config: FILE.py configs/small.py"),
    ("--config=configs/smal.py", "no config file 'configs/smal.py' configs/small.py"),
    ("--config=F:huge", "configs/small.py unknown argument 'huge' small or large"),
  ],
)
def test_a_mistake_is_one_line_and_status_2(capsys, config_file, arguments, words):
  argv = arguments.replace("F", config_file).split()
  status, out, err = run(capsys, never, *argv)
  assert (status, out, err.count("\n")) == (2, "", 1)
  assert err.startswith("error: ")
  assert all(word in err for word in words.split())


@pytest.mark.parametrize(
  "line, kind",
  [
    ("ConfigDict().modle.width = 3", AttributeError),
    ("dict()['width']", KeyError),
    ("int('four')", ValueError),
  ],
)
def test_a_mistake_within_a_config_keeps_its_traceback(capsys, config_file, line, kind):
  with open(config_file, "a") as file:
    file.write(f"\n\ndef get_config():\n  {line}\n")
  with pytest.raises(kind) as error:
    command.run(never, FLAGS, [f"--config={config_file}"])
  frames = [frame.path.name for frame in error.traceback]
  assert "small.py" in frames


@pytest.mark.parametrize(
  "folder, name, words",
  [
    ("/", "quickstart.py", f"no config file start folder {ROOT}"),
    (ROOT, "quickstart.py:huge", "configs/quickstart.py takes no argument :huge"),
  ],
)
def test_a_config_is_named_as_the_clone_has_it(
  capsys, monkeypatch, folder, name, words
):
  monkeypatch.chdir(folder)
  status, _, err = run(capsys, never, f"--config=configs/{name}")
  assert (status, err.count("\n")) == (2, 1)
  assert all(word in err for word in words.split())


@pytest.mark.parametrize(
  "error, status, err",
  [
    (InputError("empty file train.en"), 2, "error: empty file train.en\n"),
    (KeyboardInterrupt(), 130, "interrupted\n"),
    (OSError(errno.ENOSPC, "", "a.bin"), 2, f"error: cannot write a.bin ({FULL}\n"),
  ],
)
def test_input_errors_and_interrupts_are_one_line(capsys, error, status, err):
  def main():
    raise error

  assert run(capsys, main, flags={}) == (status, "", err)


def test_an_interrupt_while_a_command_is_imported_leaves_no_traceback(tmp_path):
  slow = "import time\nprint('imported', flush=True)\ntime.sleep(60)\n"
  (tmp_path / "filelock.py").write_text(slow)  # shadows a package that commands import
  words = [sys.executable, "-m", "experiments.report"]
  pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  env = os.environ | dict(PYTHONPATH=str(tmp_path))
  with subprocess.Popen(words, cwd=ROOT, env=env, **pipes) as process:
    assert process.stdout.readline() == "imported\n"
    process.send_signal(signal.SIGINT)
    assert process.stderr.read() == ""
  assert process.returncode == -signal.SIGINT  # 130 in a shell


@pytest.mark.parametrize("place", ["import", "gc"])
def test_an_interrupt_kills_where_libraries_drop_exceptions(place, tmp_path):
  (tmp_path / "extension.py").write_text("import main\nmain.interrupt()")
  code = """
import gc, signal, sys
from experiments import command

def interrupt(*_):
  try:
    signal.raise_signal(signal.SIGINT)
  except KeyboardInterrupt:
    print("dropped")

def work(place):
  if place == "import":
    import extension
  else:
    gc.callbacks.append(interrupt)
    gc.collect()

sys.modules["main"] = sys.modules["__main__"]
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as while a command is imported
command.run(work, dict(place=command.Flag("", "")), sys.argv[1:])
"""
  answer = run_python(code, f"--place={place}", path=f"{ROOT}:{tmp_path}")
  assert (answer.returncode, answer.stdout, answer.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(
  "word, kind", [("--help", command.CONFIG), ("-h", command.SWEEP)]
)
def test_help_explains_the_command_its_flags_and_the_configs(
  capsys, config_file, word, kind
):
  flags = FLAGS | dict(config=kind)
  status, out, err = run(capsys, never, "--beam_size=wide", word, flags=flags)
  assert (status, err) == (0, "")
  for words in (__doc__.strip(), "(default: 4)", "configs/small.py", "A small model."):
    assert words in out
  assert all(f"--{name}" in out for name in FLAGS)
  assert "More about it" not in out


# Locks and memory
# --------------------------------------------------------------------------------------


def test_a_lock_is_free_when_its_process_is_killed(tmp_path):
  hold = """
import filelock, sys, time
lock = filelock.FileLock(sys.argv[1]).acquire()
print(flush=True)
time.sleep(60)
"""
  words = [sys.executable, "-c", hold, str(tmp_path / ".lock")]
  problem = (
    f"another command is using {tmp_path}: wait for it, or give another --workdir"
  )
  refusal = pytest.raises(InputError, match=problem)
  with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
    other.stdout.readline()
    with refusal, command.lock_folder(tmp_path, "workdir"):
      pass
    other.kill()
  with command.lock_folder(tmp_path, "workdir"):
    pass
  assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(command.has_accelerator(), reason="memory is kept on CPUs alone")
def test_a_command_maps_its_memory_once_whatever_plugins_are_installed(tmp_path):
  (tmp_path / "jax_plugins").mkdir()
  code = """
import itertools, resource
import jax, jax.numpy as jnp
from experiments import command

def double(x):
  return jnp.cumsum(jnp.cumsum(x[:, None] + x, 0), 1)[::7].sum()

def main():
  compiled = jax.jit(double)
  counts = []
  for _ in range(4):
    compiled(jnp.ones(3000)).block_until_ready()
    counts.append(resource.getrusage(0).ru_minflt)
  print(min(after - before for before, after in itertools.pairwise(counts)))

command.run(main, {}, [])
"""
  env = dict(os.environ)
  del env["MALLOC_ARENA_MAX"]
  answer = run_python(code, path=f"{tmp_path}:{ROOT}", env=env, check=True)
  # Pages of 4 KiB: a matrix of 3,000 x 3,000 has 8,789. It may be moved once. It takes
  # 36 MB: by default, glibc maps memory anew for each array of more than 32 MiB.
  assert int(answer.stdout) < 1000
