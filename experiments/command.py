"""Parses flags, prints help and one-line errors, and locks folders for every command."""

import ast
import contextlib
import ctypes
import importlib.util
import io
import math
import os
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import filelock
from absl import flags as absl_flags
from ml_collections import ConfigDict, config_flags

from experiments import signals
from experiments.config import check_keys
from experiments.errors import InputError
from experiments.files import (
  Path,
  bucket_lock,
  check_writable,
  in_bucket,
  to_path,
  write_refusal,
)

_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_DEFINE = {
  str: absl_flags.DEFINE_string,
  int: absl_flags.DEFINE_integer,
  float: absl_flags.DEFINE_float,
  bool: absl_flags.DEFINE_bool,
}


class Flag(NamedTuple):
  """A flag of a command, with the type of its default."""

  default: str | int | float | bool | None  # None: a required str
  help: str
  is_path: bool = False  # of a local folder or file, or of one in a bucket
  least: float | None = None  # of a number
  most: float | None = None


CONFIG = Flag(
  None, "the experiment, FILE.py[:ARGUMENT]; --config.KEY=VALUE changes one value"
)
SWEEP = Flag(
  None, "the sweep, FILE.py[:ARGUMENT]; --config.KEY=VALUE changes a value of all cells"
)
WORKDIR = Flag(None, "the folder of a training run", is_path=True)
AVERAGE = Flag(
  0, "largest number of checkpoints averaged; 0: as in the run's config", least=0
)


class ConfigFile(NamedTuple):
  """The value of a `SWEEP` flag: FILE.py[:ARGUMENT], its module, its config, the changed keys."""

  name: str
  module: types.ModuleType
  config: ConfigDict
  given: tuple[str, ...] = ()


def run(
  main: Callable[..., None],
  flags: Mapping[str, Flag],
  argv: Sequence[str] | None = None,
) -> None:
  """Calls `main` with the values of `flags` by name, and exits.

  The exit status is 0; 2 after an `InputError` or a full disk, in one line; 130 after
  Ctrl-C; 141 if the reader of stdout, such as `head`, has closed it. Other exceptions
  keep their traceback. `--help` prints the docstring of `main`'s module and the flags.
  `main` gets a `ConfigDict` for `CONFIG` and a `ConfigFile` for `SWEEP`. Most commands
  import JAX inside of `main`, so that a wrong flag is told at once.
  """
  argv = list(sys.argv[1:] if argv is None else argv)
  absl_flags.FLAGS.mark_as_parsed()  # libraries read the global flags
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
      # Whatever the locale is. A log of a killed process has what it printed.
      stream.reconfigure(encoding="utf-8", line_buffering=True)
  with contextlib.redirect_stderr(sys.stderr and DisplayStream(sys.stderr)):
    sys.exit(_run(main, flags, argv))


def _run(
  main: Callable[..., None], flags: Mapping[str, Flag], argv: Sequence[str]
) -> int:
  """Calls `main` with the values of its flags, or prints help; returns the exit status."""
  try:
    with signals.raising_interrupts():
      if {"--help", "-help", "-h"} & {*argv}:
        print(_help(main, flags))
      else:
        values = parse(flags, argv)
        _keep_compiled()
        _keep_freed_memory()
        main(**values)
      if sys.stdout:
        sys.stdout.flush()
    return 0
  except InputError as error:
    refusal = error
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    return 130
  except BrokenPipeError:
    DisplayStream(sys.stdout).flush()  # Python flushes it at exit
    return 141
  except OSError as error:
    if not (refusal := write_refusal(error, error.filename or "the output")):
      raise
    DisplayStream(sys.stdout).flush()
  print(f"error: {refusal}", file=sys.stderr)
  return 2


class DisplayStream:
  """Writes to a text stream, and drops all text once the stream cannot be written.

  It is for progress and notes, which must not end what they tell of: the reader of a
  pipe may die, a terminal may be closed, a disk may be full.
  """

  def __init__(self, stream: Any):
    self._stream = stream

  def __getattr__(self, name: str) -> Any:  # such as isatty
    return getattr(self._stream, name)

  def write(self, text: str) -> int:
    try:
      self._stream.write(text)
    except OSError:
      self._drop()
    return len(text)

  def flush(self) -> None:
    try:
      self._stream.flush()
    except OSError:
      self._drop()

  def _drop(self) -> None:
    """Has all of the process write to the null device instead, also what is buffered."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, self._stream.fileno())
    os.close(null)


def _keep_compiled() -> None:
  """Has JAX keep compiled programs for the next command, unless its variables say otherwise."""
  if {"JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"} & os.environ.keys():
    return
  import jax

  folder = os.path.expanduser("~/.cache/relpos_jax")
  with contextlib.suppress(OSError):  # a home that is not writable
    os.makedirs(folder, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_compilation_cache_max_size", 2**30)  # bytes


def _keep_freed_memory() -> None:
  """Has glibc's malloc keep freed memory for the next step, on machines without
  accelerators.

  On a CPU, XLA allocates the temporary memory of each call. Pages that malloc has given
  back must be mapped again. If a variable such as MALLOC_ARENA_MAX sets options of
  malloc, it is left as it is. Call it before JAX starts its threads: they keep the
  arenas that they have.
  """
  if has_accelerator() or any(name.startswith("MALLOC_") for name in os.environ):
    return
  with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
    mallopt = ctypes.CDLL(None).mallopt
    # M_ARENA_MAX: other arenas map large blocks whatever the next option says.
    mallopt(-8, 1)
    mallopt(-4, 0)  # M_MMAP_MAX: no large block is a mapping of its own
    mallopt(-1, -1)  # M_TRIM_THRESHOLD: the end of the heap is not given back


def has_accelerator() -> bool:
  """Returns whether the machine has a device file of a GPU or TPU."""
  names = "nvidia[0-9]*", "kfd", "dxg", "accel[0-9]*", "vfio/[0-9]*"
  return any(any(pathlib.Path("/dev").glob(name)) for name in names)


def parse(flags: Mapping[str, Flag], argv: Sequence[str]) -> dict[str, object]:
  """Returns the values of `flags` in the arguments `argv`; those of paths as paths,
  unless empty.

  Raises InputError: a flag, config file or config key is unknown, missing or of the
  wrong type.
  """
  argv = ["command", *argv]
  values = absl_flags.FlagValues()
  file = None
  try:
    for name, flag in flags.items():
      if flag in (CONFIG, SWEEP):
        file, argv = _read_config_file(argv, flag)
        options = dict(flag_values=values, sys_argv=argv)
        config_flags.DEFINE_config_dict(name, file.config, **options)
      else:
        _define(name, flag, values)
    _, *unused = values(argv)
  except (absl_flags.Error, AttributeError, KeyError) as error:
    message = error.args[0] if error.args else error
    text = " ".join(str(message).split())
    raise InputError(f"{text} (--help shows the flags)") from error
  if unused:
    raise InputError(f"unexpected argument {unused[0]!r}: give flags as --name=value")
  return {
    name: _value(name, flag, values[name].value, file) for name, flag in flags.items()
  }


def _define(name: str, flag: Flag, values: absl_flags.FlagValues) -> None:
  kind = str if flag.default is None else type(flag.default)
  options = {}
  if kind in (int, float):
    options = dict(lower_bound=flag.least, upper_bound=flag.most)
  _DEFINE[kind](name, flag.default, flag.help, flag_values=values, **options)


def _value(name: str, flag: Flag, value: Any, file: ConfigFile | None) -> Any:
  """Returns the value of a flag as its command gets it."""
  if flag.default is None and value in (None, ""):
    raise InputError(f"missing --{name}: {flag.help}")
  if isinstance(value, float) and not math.isfinite(value):
    raise InputError(f"--{name}={value}: give a finite number")
  if flag == SWEEP:
    return file
  return to_path(value) if flag.is_path and value else value


def _read_config_file(argv: list[str], flag: Flag) -> tuple[ConfigFile, list[str]]:
  """Loads the config file that `argv` names; returns it and the other arguments."""
  first = absl_flags.FlagValues()
  name = absl_flags.DEFINE_string("config", None, "", flag_values=first)
  argv = first(argv, known_only=True)
  known = ", ".join(_configs())
  if not name.value:
    raise InputError(f"missing --config: {flag.help}: there are {known}")
  path, _, argument = name.value.partition(":")
  if not pathlib.Path(path).is_file():
    raise InputError(f"no config file {path!r}: there are {known}")
  spec = importlib.util.spec_from_file_location("config_file", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  try:
    config = module.get_config(argument) if argument else module.get_config()
  except (TypeError, ValueError) as error:  # an unknown argument
    raise InputError(f"{name.value}: {error}") from error
  keys = []
  for word in argv:
    change = re.match(r"--?(?:no)?config\.([^=]*)", word)
    if change:
      keys.append(change[1])
  check_keys(keys, config)
  return ConfigFile(name.value, module, config.lock(), tuple(keys)), argv


def make_folder(folder: Path, flag: str) -> pathlib.Path:
  """Makes the folder that a flag names; raises InputError if it cannot be made or written."""
  if in_bucket(folder):
    raise InputError(f"--{flag}={folder}: give a local folder")
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise InputError(
      f"cannot use {folder} ({error.strerror}): give another --{flag}"
    ) from error
  check_writable(folder, f"give another --{flag}")
  return folder


@contextlib.contextmanager
def lock_folder(folder: Path, flag: str) -> Iterator[None]:
  """Locks the folder that a flag names; makes it if missing, and removes it if left
  empty.

  The lock is released when its process ends, even if it is killed; in a bucket, see
  `bucket_lock`.

  Raises InputError: another process holds the lock, or the folder cannot be written or
  locked.
  """
  if in_bucket(folder):
    with bucket_lock(folder, flag):
      yield
    return
  is_new = not folder.exists()
  file = make_folder(folder, flag) / ".lock"
  lock = filelock.FileLock(file, timeout=0)
  try:
    lock.acquire()
  except filelock.Timeout:
    remedy = f"wait for it, or give another --{flag}"
    stale = f"if none runs on any machine, delete {file}"  # its machine died
    raise InputError(f"another command is using {folder}: {remedy}; {stale}") from None
  except OSError as error:  # the file system has no locks
    remedy = f"give a --{flag} on another disk"
    raise InputError(f"cannot lock {folder} ({error.strerror}): {remedy}") from error
  try:
    yield
  finally:
    with contextlib.suppress(OSError):  # on a disk that is read-only by now
      file.unlink()
    lock.release()
    if is_new:
      with contextlib.suppress(OSError):  # it is not empty
        folder.rmdir()


def _configs() -> dict[str, str]:
  """Returns the first line of the docstring of each of the project's configs."""
  lines = {}
  for path in sorted(_CONFIGS.glob("*.py")):
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    lines[f"configs/{path.name}"] = docstring.partition("\n")[0]
  return lines


def _help(main: Callable[..., None], flags: Mapping[str, Flag]) -> str:
  lines = [(main.__globals__["__doc__"] or "").strip(), "", "Flags:"]
  for name, flag in flags.items():
    default = "" if flag.default in (None, "") else f" (default: {flag.default})"
    lines.append(f"  --{name:12} {flag.help}{default}")
  if {CONFIG, SWEEP} & {*flags.values()}:
    lines += ["", "Configs:"]
    lines += [f"  {name:22} {line}" for name, line in _configs().items()]
    lines += ["", "configs/default.py explains every KEY; the others, their ARGUMENTs."]
  return "\n".join(lines)
