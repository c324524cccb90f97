"""A program that is kept is found by what it depends on, and a broken file is none."""

import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, NamedSharding

from experiments.training.programs import cache_programs


class Pair(NamedTuple):
  first: jax.Array
  second: tuple[jax.Array, None]


ARGS = np.arange(4), (np.ones(4), None)


@pytest.fixture
def process(cache):
  """Calls a program as a new process would; returns how often it is traced."""
  devices = jax.devices()[:2]
  mesh = jax.make_mesh((2,), ("rows",), devices=devices, axis_types=(AxisType.Auto,))

  def process(args=ARGS, key="a") -> int:
    traced = []

    def multiply(pair, by):
      traced.append(True)
      return Pair(pair.first * by, (pair.second[0] + by, None))

    function = jax.jit(multiply, donate_argnums=0)
    pair = jax.device_put(Pair(*args), NamedSharding(mesh, jax.P("rows")))
    call = cache_programs(function, key, devices)
    for by in (3, 4):
      found = call(jax.tree.map(jnp.copy, pair), np.int32(by))
      wanted = Pair(args[0] * by, (args[1][0] + by, None))
      jax.tree.map(np.testing.assert_array_equal, found, wanted)
      assert found.first.sharding == pair.first.sharding
    return len(traced)

  return process


OTHER_SHAPE = np.arange(8), ARGS[1]
OTHER_DTYPE = np.arange(4.0), ARGS[1]


@pytest.mark.parametrize(
  "change", [{"key": "b"}, {"args": OTHER_SHAPE}, {"args": OTHER_DTYPE}]
)
def test_another_process_traces_only_what_has_another_key_shape_or_dtype(
  process, change
):
  assert [process(), process(**change), process(**change), process()] == [1, 1, 0, 0]


def sort_product(x):
  return jnp.sort(x @ x.T)


def test_a_program_that_jax_has_compiled_before_is_kept_whole(cache):
  name = "jax_persistent_cache_min_compile_time_secs"
  before = jax.config.values[name]
  jax.config.update(name, 0)
  compilation_cache.reset_cache()  # so that it uses the folder
  try:
    jax.jit(sort_product)(jnp.eye(8))
    for _ in range(2):
      call = cache_programs(jax.jit(sort_product), "a", jax.devices()[:1])
      np.testing.assert_array_equal(call(jnp.eye(8)), np.sort(np.eye(8)))
  finally:
    jax.config.update(name, before)
    compilation_cache.reset_cache()


def flip_bit(content: bytes) -> bytes:
  flipped = bytearray(content)
  flipped[len(content) // 5] ^= 1
  return bytes(flipped)


@pytest.mark.parametrize("damage", [lambda _: b"", flip_bit])
def test_a_broken_file_is_replaced(process, cache, damage):
  process()
  (file,) = (cache / "programs").iterdir()
  file.write_bytes(damage(file.read_bytes()))
  assert [process(), process()] == [1, 0]


def test_files_that_another_user_could_have_written_are_not_read(
  process, cache, monkeypatch
):
  process()
  (file,) = (cache / "programs").iterdir()
  assert process() == 0
  file.chmod(0o666)
  assert [process(), process()] == [1, 0]
  own = os.getuid()
  monkeypatch.setattr(os, "getuid", lambda: own + 1)
  assert process() == 1


def test_a_folder_that_cannot_be_written_and_no_key_keep_nothing(process, cache):
  assert [process(key=""), process(key="")] == [1, 1]
  (cache / "programs").write_text("a file")
  assert [process(), process()] == [1, 1]


def test_the_files_used_least_are_deleted(process, cache, monkeypatch):
  folder = cache / "programs"
  process()
  (used,) = folder.iterdir()
  process(key="b")
  for file in folder.iterdir():  # a file system's clock may be coarse
    os.utime(file, (1, 1))
  process()
  limit = 5 * used.stat().st_size // 2
  monkeypatch.setattr("experiments.training.programs._MOST_BYTES", limit)
  assert [process(key="c"), process(), process(key="b")] == [1, 0, 1]
