"""Parses flags, prints help, reports errors in one line, and locks folders."""

import ast
import contextlib
import ctypes
import importlib.util
import inspect
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
  check_writable,
  explain_write_error,
  in_bucket,
  lock_in_bucket,
  to_path,
)

_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_DEFINE = {
  str: absl_flags.DEFINE_string,
  int: absl_flags.DEFINE_integer,
  float: absl_flags.DEFINE_float,
  bool: absl_flags.DEFINE_bool,
}


class Flag(NamedTuple):
  """Describes a flag of a command; its default gives its type.

  Attributes:
    default: None makes the flag a required string.
    help: the text that `--help` shows.
    is_path: the value is a path, on this machine or in a bucket.
    least, most: the limits of a number.
  """

  default: str | int | float | bool | None
  help: str
  is_path: bool = False
  least: float | None = None
  most: float | None = None


CONFIG = Flag(
  None, "the experiment, FILE.py[:ARGUMENT]; --config.KEY=VALUE changes one value"
)
SWEEP = Flag(
  None, "the sweep, FILE.py[:ARGUMENT]; --config.KEY=VALUE changes a value of all runs"
)
WORKDIR = Flag(None, "the folder of a training run", is_path=True)
AVERAGE = Flag(0, "averages the last N checkpoints; 0 uses the run's config", least=0)


class ConfigFile(NamedTuple):
  """Holds a config file that a command has loaded: the value of a `SWEEP` flag.

  Attributes:
    name: FILE.py[:ARGUMENT], as the user gave it.
    module: the loaded file.
    config: its config, with the changes of the command line.
    changed_keys: the dotted keys that the command line changed.
  """

  name: str
  module: types.ModuleType
  config: ConfigDict
  changed_keys: tuple[str, ...] = ()


def run(
  main: Callable[..., None],
  flags: Mapping[str, Flag],
  argv: Sequence[str] | None = None,
  about: str = "",
) -> None:
  """Calls `main` with the values of `flags` by name, and exits.

  Exits with status 0 on success. An `InputError` or a full disk is reported in one
  line, with status 2. The status is 130 after Ctrl-C, and 141 if the reader of stdout,
  such as `head`, has closed it. Other exceptions keep their traceback.

  `--help` prints `about`, by default the docstring of `main`'s module, and the flags.
  `main` receives a `ConfigDict` for `CONFIG` and a `ConfigFile` for `SWEEP`. Most
  commands import JAX within `main`, so that a wrong flag is reported without waiting
  for the import.
  """
  argv = list(sys.argv[1:] if argv is None else argv)
  absl_flags.FLAGS.mark_as_parsed()  # libraries read the global flags
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
      # UTF-8 in every locale. By lines, so that the log of a killed process is
      # complete.
      stream.reconfigure(encoding="utf-8", line_buffering=True)
  with contextlib.redirect_stderr(sys.stderr and DisplayStream(sys.stderr)):
    sys.exit(_run(main, flags, argv, about or main.__globals__["__doc__"] or ""))


def _run(
  main: Callable[..., None], flags: Mapping[str, Flag], argv: Sequence[str], about: str
) -> int:
  """Calls `main` with its flags, or prints help; returns the exit status."""
  try:
    with signals.raise_interrupts():
      if {"--help", "-help", "-h"} & {*argv}:
        print(_help(about, flags))
      else:
        values = parse(flags, argv)
        _enable_compilation_cache()
        _configure_malloc()
        main(**values)
      if sys.stdout:
        sys.stdout.flush()
    return 0
  except InputError as error:
    return _refuse(error)
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    return 130
  except BrokenPipeError:
    DisplayStream(sys.stdout).flush()  # Python flushes it at exit
    return 141
  except OSError as error:
    refusal = explain_write_error(error, error.filename or "the output")
    if not refusal:
      raise
    DisplayStream(sys.stdout).flush()
    return _refuse(refusal)


def _refuse(reason: InputError) -> int:
  """Prints why a command is refused; returns the exit status."""
  print(f"error: {reason}", file=sys.stderr)
  return 2


class DisplayStream:
  """Writes to a text stream, and drops all text once the stream fails.

  Progress and notes use it. They must not end a training run when the reader of a pipe
  dies, the terminal is closed or the disk is full.
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
    """Redirects the stream to the null device, for all code that writes to it.

    This also drops the text that the stream has buffered.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, self._stream.fileno())
    os.close(null)


def _enable_compilation_cache() -> None:
  """Turns on JAX's cache of compiled programs.

  Does nothing if an environment variable already configures the cache.
  """
  if {"JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"} & os.environ.keys():
    return
  import jax

  folder = os.path.expanduser("~/.cache/relpos_jax")
  with contextlib.suppress(OSError):  # the home may be read-only
    os.makedirs(folder, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_compilation_cache_max_size", 2**30)  # bytes


def _configure_malloc() -> None:
  """Makes glibc's malloc reuse freed memory, on machines without accelerators.

  On a CPU, XLA allocates temporary memory in each call. By default malloc returns it to
  the system, and every step has to map its pages again. Nothing changes if a variable
  such as MALLOC_ARENA_MAX already sets options of malloc. Call this before JAX starts
  its threads: a running thread keeps its arena.
  """
  if has_accelerator() or any(name.startswith("MALLOC_") for name in os.environ):
    return
  with contextlib.suppress(AttributeError, OSError, TypeError):  # no glibc
    mallopt = ctypes.CDLL(None).mallopt
    # M_ARENA_MAX: only the main arena obeys the next option.
    mallopt(-8, 1)
    mallopt(-4, 0)  # M_MMAP_MAX: never map a large block by itself
    mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink the heap


def has_accelerator() -> bool:
  """Checks for the device file of a GPU or TPU."""
  names = "nvidia[0-9]*", "kfd", "dxg", "accel[0-9]*", "vfio/[0-9]*"
  return any(any(pathlib.Path("/dev").glob(name)) for name in names)


def parse(flags: Mapping[str, Flag], argv: Sequence[str]) -> dict[str, object]:
  """Parses the arguments `argv`; returns the values of `flags` by name.

  The value of a flag with `is_path` is a path, or "" if it is empty.

  Raises InputError if a flag, config file or config key is unknown, missing or of the
  wrong type.
  """
  argv = ["command", *argv]
  values = absl_flags.FlagValues()
  file = None
  # Not in the `try` below: a mistake within a config file needs its traceback.
  for flag in flags.values():
    if flag in (CONFIG, SWEEP):
      file, argv = _read_config_file(argv, flag)
  try:
    for name, flag in flags.items():
      if flag in (CONFIG, SWEEP):
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
  if file:
    _check_source(file)
  arguments = {}
  for name, flag in flags.items():
    arguments[name] = _value(name, flag, values[name].value, file)
  return arguments


def _define(name: str, flag: Flag, values: absl_flags.FlagValues) -> None:
  kind = str if flag.default is None else type(flag.default)
  options = {}
  if kind in (int, float):
    options = dict(lower_bound=flag.least, upper_bound=flag.most)
  _DEFINE[kind](name, flag.default, flag.help, flag_values=values, **options)


def _value(name: str, flag: Flag, value: Any, file: ConfigFile | None) -> Any:
  """Checks a flag's value and converts it to the type that `main` takes."""
  if flag.default is None and value in (None, ""):
    raise InputError(f"missing --{name}: {flag.help}")
  if isinstance(value, float) and not math.isfinite(value):
    raise InputError(f"--{name}={value}: give a finite number")
  if flag == SWEEP:
    return file
  return to_path(value) if flag.is_path and value else value


def _read_config_file(argv: list[str], flag: Flag) -> tuple[ConfigFile, list[str]]:
  """Loads the config file that `argv` names; returns it and the other arguments."""
  config_flag = absl_flags.FlagValues()
  name = absl_flags.DEFINE_string("config", None, "", flag_values=config_flag)
  config_flag.mark_as_parsed()
  with contextlib.suppress(absl_flags.Error):  # --config without a value
    argv = config_flag(argv, known_only=True)
  if not name.value:
    known = ", ".join(_configs())
    raise InputError(f"missing --config: {flag.help}: there are {known}")
  path, _, argument = name.value.partition(":")
  if not pathlib.Path(path).is_file():
    known = _configs()
    remedy = f"there are {', '.join(known)}"
    if path in known:
      remedy = f"start the command in the folder {_CONFIGS.parent}"
    raise InputError(f"no config file {path!r}: {remedy}")
  spec = importlib.util.spec_from_file_location("config_file", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = _make_config(module, path, argument)
  keys = []
  for word in argv:
    change = re.match(r"--?(?:no)?config\.([^=]*)", word)
    if change:
      keys.append(change[1])
  check_keys(keys, config)
  return ConfigFile(name.value, module, config.lock(), tuple(keys)), argv


def _make_config(module: types.ModuleType, path: str, argument: str) -> ConfigDict:
  """Calls `get_config` of a config file; raises InputError for an unknown argument."""
  if not argument:
    return module.get_config()
  if not inspect.signature(module.get_config).parameters:
    raise InputError(f"{path} takes no argument: leave out :{argument}")
  try:
    return module.get_config(argument)
  except ValueError as error:
    raise InputError(f"{path}:{argument}: {error}") from error


def _check_source(file: ConfigFile) -> None:
  """Raises InputError if the command line changes options of an unused data source."""
  for key in file.changed_keys:
    option = re.match(r"data\.(\w+)\.", key)
    if option and option[1] != file.config.data.source:
      raise InputError(
        f"--config.{key} is given, but config.data.source is "
        f"{file.config.data.source!r}: give --config.data.source={option[1]}, too"
      )


def make_folder(folder: Path, flag: str) -> pathlib.Path:
  """Makes the folder that a flag names; raises InputError unless it is writable."""
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
  """Locks the folder that a flag names.

  Makes the folder if it is missing, and removes it again if it stays empty. The lock is
  released when its process ends, even if it is killed. `lock_in_bucket` does the same
  for a bucket.

  Raises InputError if another process holds the lock, or the folder cannot be written
  or locked.
  """
  if in_bucket(folder):
    with lock_in_bucket(folder, flag):
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
    with contextlib.suppress(OSError):  # the disk may have become read-only
      file.unlink()
    lock.release()
    if is_new:
      with contextlib.suppress(OSError):  # it is not empty
        folder.rmdir()


def _configs() -> dict[str, str]:
  """Returns the first docstring line of every config in configs/, by file name."""
  lines = {}
  for path in sorted(_CONFIGS.glob("*.py")):
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    lines[f"configs/{path.name}"] = docstring.partition("\n")[0]
  return lines


def _help(about: str, flags: Mapping[str, Flag]) -> str:
  lines = [about.strip(), "", "Flags:"]
  for name, flag in flags.items():
    default = "" if flag.default in (None, "") else f" (default: {flag.default})"
    lines.append(f"  --{name:12} {flag.help}{default}")
  if {CONFIG, SWEEP} & {*flags.values()}:
    lines += ["", "Configs:"]
    lines += [f"  {name:22} {line}" for name, line in _configs().items()]
    lines += [
      "",
      "configs/default.py explains every KEY; the other files explain their ARGUMENTs.",
    ]
  return "\n".join(lines)
