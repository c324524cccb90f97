"""What every command shares: its flags, its help, and one clear line for a user's mistake."""

import ast
import errno
import functools
import importlib.util
import inspect
import io
import operator
import os
import pathlib
import re
import signal
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from absl import flags as absl_flags
from ml_collections import ConfigDict, config_flags

from experiments.values import has_key, unknown_key
from relpos_jax.errors import InputError
from relpos_jax.training.workdir import check_writable

_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_UNUSABLE = (errno.ENAMETOOLONG, errno.EACCES)  # a path that only another path can mend
_LONGEST = 2**20  # the compiler can count the bytes of all pairs of so many tokens


class Flag(NamedTuple):
  """A flag: its default, whose type (str, int, float or bool) is the flag's, and its meaning.

  A flag whose default is None is a str that must be given.
  """

  default: str | int | float | bool | None
  help: str


CONFIG = Flag(None, "the experiment, FILE.py[:ARGUMENT]; --config.KEY=VALUE changes a value of it")
SWEEP = Flag(None, "the sweep, FILE.py[:ARGUMENT]; --config.KEY=VALUE changes a value of all cells")


class ConfigFile(NamedTuple):
  """What `SWEEP` gives: a config file as it was named, its module, and its config, as changed."""

  name: str
  module: types.ModuleType
  config: ConfigDict
  given: tuple[str, ...] = ()  # the keys for which there is a --config.KEY


def run(
  main: Callable[..., None], flags: Mapping[str, Flag], argv: Sequence[str] | None = None
) -> None:
  """Calls `main` with the values of `flags` by name, and exits.

  Exit status: 0; 2 after a user's mistake (an `InputError`, flags that do not parse, or a path that
  is too long or may not be looked into), which is told in one line on stderr; 130 when interrupted
  from the keyboard; 141 when the reader of stdout, such as `head`, went away. `--help` prints the
  docstring of `main`'s module and the flags. Any other exception is a bug and keeps its traceback.
  Text goes out as UTF-8, whatever the locale.

      if __name__ == "__main__":
        command.run(main, dict(config=command.CONFIG, workdir=command.Flag(None, "run's folder")))

  Args:
    main: the command.
    flags: by name; `CONFIG` gives `main` the `ConfigDict` of the file that the user names, and
      `SWEEP` the `ConfigFile`.
    argv: the arguments; those of the command line by default.
  """
  argv = list(sys.argv[1:] if argv is None else argv)
  if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as `experiments` has left it
    signal.signal(signal.SIGINT, signal.default_int_handler)
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(encoding="utf-8")
  if {"--help", "-help", "-h"} & set(argv):
    print(_help(main, flags))
    sys.exit(0)
  # Libraries read the global flags, which are theirs: they keep their defaults.
  absl_flags.FLAGS.mark_as_parsed()
  try:
    main(**parse(flags, argv))
  except InputError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at its end.
    sys.exit(141)
  except OSError as error:
    if error.errno not in _UNUSABLE or error.filename is None:
      raise
    print(f"error: {error.filename}: {error.strerror}; give another path", file=sys.stderr)
    sys.exit(2)
  sys.exit(0)


def parse(flags: Mapping[str, Flag], argv: Sequence[str]) -> dict[str, object]:
  """The values of `flags` in the arguments `argv`.

  Raises:
    InputError: a flag, config file or config key is unknown, missing or of the wrong type.

  >>> parse(dict(workdir=Flag(None, "run's folder"), beam_size=Flag(4, "")), ["--workdir=runs/a"])
  {'workdir': 'runs/a', 'beam_size': 4}
  """
  try:
    return _parse(flags, ["command", *argv])
  except absl_flags.Error as error:
    text = " ".join(str(error).split())
    for said, meant in _MEANT.items():
      text = text.replace(said, meant)
    raise InputError(f"{text} (--help shows the flags)") from error


def make_folder(folder: str | os.PathLike, flag: str) -> pathlib.Path:
  """The folder that a flag names, made if it is not there: better found out now than after work.

  Raises:
    InputError: it cannot be, or no file can be made in it.
  """
  folder = pathlib.Path(folder)
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise InputError(f"cannot use {folder} ({error.strerror}): give another --{flag}") from error
  check_writable(folder, f"give another --{flag}")
  return folder


def lengths(name: str, text: str) -> list[int]:
  """The value of a flag that names lengths, separated by commas.

  Raises:
    InputError: one is no number from 1 to 2**20.

  >>> lengths("lengths", "512,1024")
  [512, 1024]
  """
  words = text.split(",") if text else []
  for word in words:
    if not re.fullmatch("0*[1-9][0-9]{0,6}", word) or int(word) > _LONGEST:
      raise InputError(
        f"--{name}: {word!r} is no length; want numbers such as 512,1024, at most {_LONGEST:,}"
      )
  return [int(word) for word in words]


def _parse(flags, argv):
  values, files = absl_flags.FlagValues(), {}
  for name, flag in flags.items():
    if flag in (CONFIG, SWEEP):
      argv, files[name] = _define_config(name, argv, values)
    else:
      kind = str if flag.default is None else type(flag.default)
      _DEFINE[kind](name, flag.default, flag.help, flag_values=values)
  _, *unused = values(argv)
  if unused:
    raise InputError(f"unexpected argument {unused[0]!r}: flags are given as --name=value")
  for name, flag in flags.items():
    if flag.default is None and values[name].value in (None, ""):
      raise InputError(f"missing --{name}: {flag.help}")
  result = {name: values[name].value for name in flags}
  for name in [name for name in files if flags[name] == SWEEP]:
    result[name] = files[name]._replace(config=result[name])
  return result


# What Python says of a value that does not parse, and what it means.
_MEANT = {
  "invalid literal for int() with base 10:": "not an int:",
  "could not convert string to float:": "not a float:",
}
_DEFINE = {
  str: absl_flags.DEFINE_string,
  int: absl_flags.DEFINE_integer,
  float: absl_flags.DEFINE_float,
  bool: absl_flags.DEFINE_bool,
}


def _define_config(name, argv, values):
  """Loads the config that `argv` names, and defines the flags that change it.

  Returns the other arguments, and the file.
  """
  first = absl_flags.FlagValues()
  file = absl_flags.DEFINE_string(name, None, "", flag_values=first)
  argv = first(argv, known_only=True)
  if not file.value:
    stray = next((a for a in argv[1:] if pathlib.Path(a.partition(":")[0]).is_file()), "")
    meant = f" (write --{name}={stray})" if stray else ""
    raise InputError(f"missing --{name}=FILE{meant}: {_available()}")
  loaded = _load_config(file.value)
  changes = [re.match(rf"--?(?:no)?{name}\.([^=]*)", argument) for argument in argv]
  given = tuple(change[1] for change in changes if change)
  for key in given:
    _check_key(key, loaded.config)
  config_flags.DEFINE_config_dict(name, loaded.config, flag_values=values, sys_argv=argv)
  return argv, loaded._replace(given=given)


def _check_key(name: str, config: ConfigDict) -> None:
  if not has_key(name, config):
    raise unknown_key(name, config)
  value = functools.reduce(operator.getitem, name.split("."), config)
  if isinstance(value, ConfigDict):
    example = next(iter(value), "KEY")
    raise InputError(f"config.{name} is a group: change config.{name}.{example}, or so")


def _load_config(file: str) -> ConfigFile:
  path, _, argument = file.partition(":")
  if not pathlib.Path(path).is_file():
    raise InputError(f"no config file {path!r}: {_available()}")
  try:
    spec = importlib.util.spec_from_file_location("config_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = _call(module.get_config, path, [argument] if argument else [])
  except InputError:
    raise
  except Exception as error:
    raise mistake_in(path, error) from error
  if not isinstance(config, ConfigDict):
    raise InputError(
      f"{path}: get_config() must return a ConfigDict, not a {type(config).__name__}"
    )
  return ConfigFile(file, module, config.lock())


def mistake_in(path: str, error: Exception) -> InputError:
  """What a config file raised, in one line with its own."""
  return InputError(f"{_place(error, path)}: {' '.join(str(error).split())}")


def _call(get_config, path, arguments):
  try:
    inspect.signature(get_config).bind(*arguments)
  except TypeError as error:
    takes = "takes no argument" if arguments else "needs an argument, as in FILE.py:ARGUMENT"
    raise InputError(f"{path} {takes}") from error
  return get_config(*arguments)


def _place(error: Exception, path: str) -> str:
  """The file, and the line of it at which the error arose."""
  file = os.path.abspath(path)
  lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
  return f"{path}, line {lines[-1]}" if lines else path


def _available() -> str:
  return f"there are {', '.join(name for name, _ in _configs())}"


def _configs() -> list[tuple[str, str]]:
  """The project's configs, each with the first line of its docstring."""
  files = [path for path in sorted(_CONFIGS.glob("*.py")) if path.name != "__init__.py"]
  docs = [ast.get_docstring(ast.parse(path.read_text())) or "" for path in files]
  return [
    (f"configs/{path.name}", doc.partition("\n")[0]) for path, doc in zip(files, docs, strict=True)
  ]


def _help(main, flags) -> str:
  lines = [(main.__globals__["__doc__"] or "").strip(), "", "Flags:"]
  for name, flag in flags.items():
    default = "" if flag.default in (None, "") else f" (default: {flag.default})"
    lines.append(f"  --{name:12} {flag.help}{default}")
  if {CONFIG, SWEEP} & {*flags.values()}:
    lines += ["", "Configs:", *(f"  {name:22} {line}" for name, line in _configs())]
    lines += ["", "configs/default.py explains every KEY; the others, their ARGUMENTs."]
  return "\n".join(lines)
