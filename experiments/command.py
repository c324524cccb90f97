"""Parses flags, prints help and one-line errors for every command."""

import ast
import importlib.util
import io
import os
import pathlib
import re
import signal
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from absl import flags as absl_flags
from ml_collections import ConfigDict, config_flags

from relpos_jax.config import flatten, unknown_key
from relpos_jax.errors import InputError
from relpos_jax.training.workdir import check_writable

_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


class Flag(NamedTuple):
  """A flag of a command.

  Attributes:
    default: a str, int, float or bool, which is also the flag's type; None: a required str.
    help: a clause.
  """

  default: str | int | float | bool | None
  help: str


CONFIG = Flag(None, "the experiment, FILE.py[:ARGUMENT]; --config.KEY=VALUE changes one value")
SWEEP = Flag(None, "the sweep, FILE.py[:ARGUMENT]; --config.KEY=VALUE changes a value of all cells")


class ConfigFile(NamedTuple):
  """The value of a `SWEEP` flag: FILE.py[:ARGUMENT], its module, its config, the changed keys."""

  name: str
  module: types.ModuleType
  config: ConfigDict
  given: tuple[str, ...] = ()


def run(
  main: Callable[..., None], flags: Mapping[str, Flag], argv: Sequence[str] | None = None
) -> None:
  """Calls `main` with the values of `flags` by name, and exits.

  The exit status is 0; 2 after an `InputError`, which is printed in one line; 130 after Ctrl-C; 141
  if the reader of stdout, such as `head`, has closed it. Other exceptions keep their traceback.
  `--help` prints the docstring of `main`'s module and the flags.

  Args:
    main: the command.
    flags: by name; `main` gets a `ConfigDict` for `CONFIG` and a `ConfigFile` for `SWEEP`.
    argv: the arguments; by default those of the command line.
  """
  argv = list(sys.argv[1:] if argv is None else argv)
  if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # `experiments` sets it during imports
    signal.signal(signal.SIGINT, signal.default_int_handler)
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(encoding="utf-8")
  if {"--help", "-help", "-h"} & {*argv}:
    print(_help(main, flags))
    sys.exit(0)
  absl_flags.FLAGS.mark_as_parsed()  # libraries read the global flags
  try:
    main(**parse(flags, argv))
  except InputError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)
  except PermissionError as error:
    print(f"error: {error.filename}: {error.strerror}: give another path", file=sys.stderr)
    sys.exit(2)
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
    sys.exit(141)
  sys.exit(0)


def parse(flags: Mapping[str, Flag], argv: Sequence[str]) -> dict[str, object]:
  """Returns the values of `flags` in the arguments `argv`.

  Raises:
    InputError: a flag, config file or config key is unknown, missing or of the wrong type.

  >>> parse(dict(workdir=Flag(None, "run's folder"), beam_size=Flag(4, "")), ["--workdir=runs/a"])
  {'workdir': 'runs/a', 'beam_size': 4}
  """
  values, files = absl_flags.FlagValues(), {}
  argv = ["command", *argv]
  try:
    for name, flag in flags.items():
      if flag in (CONFIG, SWEEP):
        argv, files[name] = _define_config(name, argv, values)
      else:
        kind = str if flag.default is None else type(flag.default)
        _DEFINE[kind](name, flag.default, flag.help, flag_values=values)
    _, *unused = values(argv)
  except (absl_flags.Error, AttributeError, KeyError) as error:
    text = " ".join(str(error.args[0] if error.args else error).split())
    raise InputError(f"{text} (--help shows the flags)") from error
  if unused:
    raise InputError(f"unexpected argument {unused[0]!r}: give flags as --name=value")
  for name, flag in flags.items():
    if flag.default is None and values[name].value in (None, ""):
      raise InputError(f"missing --{name}: {flag.help}")
  is_sweep = lambda name: flags[name] == SWEEP
  return {name: files[name] if is_sweep(name) else values[name].value for name in flags}


_DEFINE = {
  str: absl_flags.DEFINE_string,
  int: absl_flags.DEFINE_integer,
  float: absl_flags.DEFINE_float,
  bool: absl_flags.DEFINE_bool,
}


def _define_config(
  name: str, argv: list[str], values: absl_flags.FlagValues
) -> tuple[list[str], ConfigFile]:
  """Loads the config file that `argv` names and defines its flags; returns the other arguments."""
  first = absl_flags.FlagValues()
  file = absl_flags.DEFINE_string(name, None, "", flag_values=first)
  argv = first(argv, known_only=True)
  path, _, argument = (file.value or "").partition(":")
  if not path:
    raise InputError(f"missing --{name}=FILE: {_available()}")
  if not pathlib.Path(path).is_file():
    raise InputError(f"no config file {path!r}: {_available()}")
  spec = importlib.util.spec_from_file_location("config_file", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  try:
    config = module.get_config(*[argument] * bool(argument))
  except (TypeError, ValueError) as error:  # an unknown argument
    raise InputError(f"{file.value}: {error}") from error
  if not isinstance(config, ConfigDict):
    raise InputError(f"{path}: get_config() returned {type(config).__name__}, not a ConfigDict")
  given = [m[1] for arg in argv if (m := re.match(rf"--?(?:no)?{name}\.([^=]*)", arg))]
  for key in given:
    if not any(f"{known}.".startswith(f"{key}.") for known in flatten(config)):
      raise unknown_key(key, config)
  config_flags.DEFINE_config_dict(name, config.lock(), flag_values=values, sys_argv=argv)
  return argv, ConfigFile(file.value, module, config, tuple(given))


def make_folder(folder: str | os.PathLike, flag: str) -> pathlib.Path:
  """Makes the folder that a flag names.

  Raises:
    InputError: the folder cannot be made or written.
  """
  folder = pathlib.Path(folder)
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise InputError(f"cannot use {folder} ({error.strerror}): give another --{flag}") from error
  check_writable(folder, f"give another --{flag}")
  return folder


def _available() -> str:
  return f"there are {', '.join(name for name, _ in _configs())}"


def _configs() -> list[tuple[str, str]]:
  """Returns the project's configs, each with the first line of its docstring."""
  files = [path for path in sorted(_CONFIGS.glob("*.py")) if path.name != "__init__.py"]
  docs = [ast.get_docstring(ast.parse(path.read_text())) or "" for path in files]
  return [
    (f"configs/{path.name}", doc.partition("\n")[0]) for path, doc in zip(files, docs, strict=True)
  ]


def _help(main: Callable[..., None], flags: Mapping[str, Flag]) -> str:
  lines = [(main.__globals__["__doc__"] or "").strip(), "", "Flags:"]
  for name, flag in flags.items():
    default = "" if flag.default in (None, "") else f" (default: {flag.default})"
    lines.append(f"  --{name:12} {flag.help}{default}")
  if {CONFIG, SWEEP} & {*flags.values()}:
    lines += ["", "Configs:", *(f"  {name:22} {line}" for name, line in _configs())]
    lines += ["", "configs/default.py explains every KEY; the others, their ARGUMENTs."]
  return "\n".join(lines)
