"""Tests flags, help, one-line errors and locks."""

import contextlib
import errno
import fcntl
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
  assert run(capsys, lambda **values: calls.append(values), *arguments) == (0, "", "")
  (values,) = calls
  config = values.pop("config")
  assert values == dict(workdir="runs/latest", beam_size=1, penalty=0.6, plot=True)
  assert config.to_dict() == dict(
    seed=0,
    model=dict(width=3, relative=False, rate=1.0, layers=(3, 4, 5), norm="pre"),
    extra={},
  )
  with pytest.raises(AttributeError):
    config.model.widht = 3


def test_a_second_command_finds_the_programs_that_the_first_compiled(tmp_path):
  code = """
import jax
from experiments import command
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
program = lambda: jax.jit(lambda x: x + 1)(1.0)
report = lambda: print(any("cache_hits" in event for event in found))
command.run(lambda: [program(), report()], {}, [])
"""
  env = dict(os.environ, HOME=str(tmp_path))
  env["PYTHONPATH"] = str(pathlib.Path(command.__file__).parents[1])
  del env["JAX_ENABLE_COMPILATION_CACHE"]
  words = [sys.executable, "-c", code]
  run = lambda: (
    subprocess.run(words, env=env, text=True, stdout=subprocess.PIPE, check=True).stdout
  )
  assert [run(), run()] == ["False\n", "True\n"]
  assert [*tmp_path.glob(".cache/relpos_jax/*")]


def test_a_killed_command_has_printed_all_lines():
  code = (
    "import os; from experiments import command; kill = lambda: os.kill(os.getpid(), 9)"
  )
  code += "; command.run(lambda: [print(1), kill()], {}, [])"
  root = pathlib.Path(command.__file__).parents[1]
  answer = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, cwd=root
  )
  assert (answer.stdout, answer.returncode) == ("1\n", -9), answer.stderr


@pytest.mark.parametrize(
  "arguments, words",
  [
    (
      ["--config=F", "--config.model.widht=3"],
      "unknown config.model.widht config.model.width?",
    ),
    (["--config=F", "--config.model.width=3.5"], "--config.model.width=3.5 int"),
    (["--config=F", "--config.model.width"], "Missing value --config.model.width"),
    (["--config=F", "--wrokdir=a"], "Unknown wrokdir workdir --help"),
    (["--config=F", "runs/a"], "unexpected argument 'runs/a' --name=value"),
    ([], "missing --config: FILE.py configs/small.py"),
    (["--config=configs/smal.py"], "no config file 'configs/smal.py' configs/small.py"),
    (["--config=F:huge"], "configs/small.py unknown argument 'huge' small or large"),
  ],
)
def test_a_mistake_is_one_line_and_status_2(capsys, config_file, arguments, words):
  arguments = [argument.replace("F", config_file) for argument in arguments]
  status, out, err = run(capsys, never, *arguments)
  assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("error: ")
  assert all(word in err for word in words.split())


@pytest.mark.parametrize(
  "error, status, err",
  [
    (InputError("empty file train.en"), 2, "error: empty file train.en\n"),
    (KeyboardInterrupt(), 130, "interrupted\n"),
    (OSError(errno.ENOSPC, "", "a.bin"), 2, f"error: cannot write a.bin ({FULL}\n"),
  ],
)
def test_input_errors_and_interrupts_are_one_line_and_bugs_have_a_traceback(
  capsys, error, status, err
):
  def main():
    raise error

  assert run(capsys, main, flags={}) == (status, "", err)
  with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
    answer = 2, "", f"error: cannot write the output ({FULL}\n"
    assert run(capsys, lambda: print("a line"), flags={}) == answer
  with pytest.raises(ZeroDivisionError):
    command.run(lambda: 1 / 0, {}, [])


def test_an_interrupt_while_a_command_is_imported_leaves_no_traceback(tmp_path):
  slow = "import time\nprint('imported', flush=True)\ntime.sleep(60)\n"
  (tmp_path / "filelock.py").write_text(slow)  # shadows a package that commands import
  words = [sys.executable, "-m", "experiments.report"]
  pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  env = os.environ | dict(PYTHONPATH=str(tmp_path))
  root = pathlib.Path(command.__file__).parents[1]
  with subprocess.Popen(words, cwd=root, env=env, **pipes) as process:
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
  root = pathlib.Path(command.__file__).parents[1]
  env = os.environ | dict(PYTHONPATH=f"{root}:{tmp_path}")
  words = [sys.executable, "-c", code, f"--place={place}"]
  answer = subprocess.run(words, capture_output=True, text=True, env=env)
  assert (answer.returncode, answer.stdout, answer.stderr) == (-signal.SIGINT, "", "")


def test_a_command_ends_as_it_does_where_its_notes_cannot_be_read():
  code = "import sys; from experiments import command; note = lambda: print(1, file=sys.stderr)"
  code += "; command.run(lambda: [note(), print(2)], {}, [])"
  reader, writer = os.pipe()
  os.close(reader)
  root = pathlib.Path(command.__file__).parents[1]
  options = dict(cwd=root, stdout=subprocess.PIPE, stderr=writer, text=True)
  answer = subprocess.run([sys.executable, "-c", code], **options)
  os.close(writer)
  assert (answer.stdout, answer.returncode) == ("2\n", 0)


@pytest.mark.parametrize("argv", [["--help"], []])
def test_a_command_ends_quietly_where_nobody_reads_what_it_prints(argv):
  code = "import sys; from experiments import command"
  code += "; command.run(lambda: print(2), {}, sys.argv[1:])"
  reader, writer = os.pipe()
  os.close(reader)
  root = pathlib.Path(command.__file__).parents[1]
  options = dict(cwd=root, stdout=writer, stderr=subprocess.PIPE, text=True)
  answer = subprocess.run([sys.executable, "-c", code, *argv], **options)
  os.close(writer)
  assert (answer.stderr, answer.returncode) == ("", 141)


@pytest.mark.parametrize(
  "word, kind", [("--help", command.CONFIG), ("-h", command.SWEEP)]
)
def test_help_explains_the_command_its_flags_and_the_configs(
  capsys, config_file, word, kind
):
  flags = FLAGS | dict(config=kind)
  status, out, err = run(capsys, never, "--beam_size=wide", word, flags=flags)
  assert (status, err) == (0, "")
  assert __doc__.strip() in out
  assert all(f"--{name}" in out for name in FLAGS) and "(default: 4)" in out
  assert (
    "configs/small.py" in out and "A small model." in out and "More about it" not in out
  )


def test_a_lock_is_free_when_its_process_is_killed_and_a_folder_left_empty_goes(
  tmp_path,
):
  folder = tmp_path / "run"
  hold = "import filelock, sys, time\nlock = filelock.FileLock(sys.argv[1]).acquire()\n"
  words = [
    sys.executable,
    "-c",
    f"{hold}print(flush=True)\ntime.sleep(60)",
    str(folder / ".lock"),
  ]
  folder.mkdir()
  with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
    other.stdout.readline()
    refusal = (
      f"another command is using {folder}: wait for it, or give another --workdir; "
    )
    refusal += f"if none runs on any machine, delete {folder}/.lock"
    with (
      pytest.raises(InputError, match=refusal),
      command.lock_folder(folder, "workdir"),
    ):
      pass
    other.kill()
  with command.lock_folder(folder, "workdir"):
    pass
  assert not [*folder.iterdir()]
  folder.rmdir()
  with command.lock_folder(folder, "workdir"):
    assert folder.is_dir()
  assert not folder.exists()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
  def no_locks(file, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

  monkeypatch.setattr(fcntl, "flock", no_locks)
  refusal = (
    rf"cannot lock {tmp_path} \(No locks available\): give a --workdir on another disk"
  )
  with (
    pytest.raises(InputError, match=refusal),
    command.lock_folder(tmp_path, "workdir"),
  ):
    pass


@pytest.mark.skipif(command.has_accelerator(), reason="memory is kept on CPUs alone")
def test_a_command_maps_its_memory_once_whatever_plugins_are_installed(
  tmp_path, monkeypatch
):
  monkeypatch.delenv("MALLOC_ARENA_MAX")
  (tmp_path / "jax_plugins").mkdir()
  monkeypatch.setenv(
    "PYTHONPATH", f"{tmp_path}:{pathlib.Path(command.__file__).parents[1]}"
  )
  program = """
import resource
import jax, jax.numpy as jnp
from experiments import command

def main():
  double = jax.jit(lambda x: jnp.cumsum(jnp.cumsum(x[:, None] + x, 0), 1)[::7].sum())
  faults = lambda: (double(jnp.ones(4096)).block_until_ready(), resource.getrusage(0).ru_minflt)[1]
  counts = [faults() for _ in range(9)]
  print(min(after - before for before, after in zip(counts, counts[1:])))

command.run(main, {}, [])
"""
  words = [sys.executable, "-c", program]
  lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout
  assert (
    int(lines) < 1000
  )  # of 4 KiB; a matrix of 4,096 x 4,096 has 16,384. It may be moved once.
