"""Caches compiled programs, so that later processes neither trace nor compile them."""

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import pickle
import stat
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from experiments.files import append_digest, remove_digest, replace_file
from experiments.training.environment import code_version, cpuinfo

_MOST_BYTES = 2**28  # in all files; those used least recently are deleted


def cache_programs(
  function: Callable, key: str, devices: Sequence[jax.Device]
) -> Callable:
  """Makes a jitted function cache its programs on disk, in JAX's cache folder.

  A program is identified by the key, this project's code, versions, settings, devices,
  and the shapes of the arguments, which must be arrays. The key must name everything
  that the function closes over. A file is not used, but written again, if it is damaged
  or if another user could have written it. Without a key or a local cache folder, or in
  several processes, returns the function unchanged.
  """
  if not key or not jax.config.jax_enable_compilation_cache:
    return function
  folder = jax.config.jax_compilation_cache_dir
  if not folder or "://" in folder or jax.process_count() > 1:
    return function
  folder = pathlib.Path(folder, "programs")
  return _CachedPrograms(function, key, devices, folder)


@dataclasses.dataclass
class _CachedPrograms:
  """Calls a function; loads its compiled programs from files, or compiles them."""

  function: Any
  key: str
  devices: Sequence[jax.Device]
  folder: pathlib.Path
  programs: dict[tuple, Callable] = dataclasses.field(default_factory=dict)
  lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

  def __call__(self, *args) -> Any:
    leaves, tree = jax.tree.flatten_with_path(args)
    kinds = [jax.sharding.get_abstract_mesh()]
    for path, leaf in leaves:
      kinds.append((path, leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)))
    known = tree, *kinds
    with self.lock:  # so that only one of several threads compiles
      if known not in self.programs:
        file = self._file(kinds)
        program = _load(file, args, self.devices)
        self.programs[known] = program or _compile(file, self.function, args)
    return self.programs[known](*args)

  def _file(self, kinds: list) -> pathlib.Path:
    settings = jax.config.values.items()
    settings = [(name, value) for name, value in settings if "cache" not in name]
    parts = self.key, kinds, self.devices, _describe_machine(), settings
    return self.folder / hashlib.sha256(repr(parts).encode()).hexdigest()


def _load(
  file: pathlib.Path, args: tuple, devices: Sequence[jax.Device]
) -> Callable | None:
  """Loads the program in a file; returns None if it cannot."""
  with contextlib.suppress(Exception):  # a broken file may raise any error
    program, out = pickle.loads(_read_own(file))
    trees = jax.tree.structure((args, {})), jax.tree.structure(out)
    program = serialize_executable.deserialize_and_load(
      program, *trees, execution_devices=devices
    )
    os.utime(file)
    return program
  return None


def _read_own(file: pathlib.Path) -> bytes:
  """Reads a file, unless another user can write it: unpickling runs what it holds.

  Raises PermissionError if another user can write it, and ValueError if it is damaged.
  """
  with open(file, "rb") as opened:
    status = os.fstat(opened.fileno())
    others_may_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if status.st_uid != os.getuid() or others_may_write:
      raise PermissionError(f"another user can write {file}")
    return remove_digest(opened.read())


def _compile(file: pathlib.Path, function: Any, args: tuple) -> Callable:
  """Compiles a program, and writes it to a file if possible.

  JAX's own cache is turned off while it compiles. On CPUs, a program from that cache
  lacks functions once it is serialized again.
  """
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()
  try:
    compiled = function.lower(*args).compile()
  finally:
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
  # JAX and the disk may refuse for many reasons. The program works without its file.
  with contextlib.suppress(Exception):
    program, _, out = serialize_executable.serialize(compiled)
    content = pickle.dumps((program, jax.tree.unflatten(out, range(out.num_leaves))))
    file.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(file) as opened:
      os.fchmod(opened.fileno(), stat.S_IRUSR | stat.S_IWUSR)
      opened.write(append_digest(content))
    _delete_old(file.parent)
  return compiled


def _delete_old(folder: pathlib.Path) -> None:
  num_bytes = 0
  programs = folder.glob("[!.]*")  # hidden ones are being written
  for file in sorted(programs, key=lambda file: file.stat().st_mtime, reverse=True):
    num_bytes += file.stat().st_size
    if num_bytes > _MOST_BYTES:
      file.unlink()


@functools.cache
def _describe_machine() -> tuple:
  """Describes the code, the chip and the compiler's flags, for the key of a program."""
  flags = [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
  device = jax.devices()[0]
  chip = (
    device.device_kind,
    device.client.platform_version,
    cpuinfo("^((?:flags|Features).*)"),
  )
  return code_version(), chip, flags
