"""A program that is kept is found again by what it depends on, and a broken file is none."""

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
  """Returns a function that calls a program as a new process would; returns how often it traces."""
  mesh = jax.make_mesh(
    (2,), ("rows",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,)
  )

  def process(args=ARGS, key="a") -> int:
    traced = []

    def multiply(pair, by):
      traced.append(True)
      return Pair(pair.first * by, (pair.second[0] + by, None)), by

    function = jax.jit(multiply, donate_argnums=0)
    pair = jax.device_put(Pair(*args), NamedSharding(mesh, jax.P("rows")))
    call = cache_programs(function, key, [*mesh.devices.flat])
    for by in (3, 4):
      found, again = call(jax.tree.map(jnp.copy, pair), np.int32(by))
      np.testing.assert_array_equal(found.first, args[0] * by)
      np.testing.assert_array_equal(found.second[0], args[1][0] + by)
      assert (
        found.second[1] is None
        and again == by
        and found.first.sharding == pair.first.sharding
      )
    return len(traced)

  return process


@pytest.mark.parametrize("change", [
  dict(key="b"), dict(args=(np.arange(8), ARGS[1])), dict(args=(np.arange(4.0), ARGS[1])),
])  # fmt: skip
def test_another_process_traces_only_what_has_another_key_shape_or_dtype(
  process, change
):
  assert [process(), process(**change), process(**change), process()] == [1, 1, 0, 0]


def test_a_program_that_jax_has_compiled_before_is_kept_whole(cache):
  name = "jax_persistent_cache_min_compile_time_secs"
  before = jax.config.values[name]
  jax.config.update(name, 0)
  compilation_cache.reset_cache()  # so that it uses the folder
  try:
    jax.jit(lambda x: jnp.sort(x @ x.T))(jnp.eye(8))
    for _ in range(2):
      call = cache_programs(
        jax.jit(lambda x: jnp.sort(x @ x.T)), "a", jax.devices()[:1]
      )
      np.testing.assert_array_equal(call(jnp.eye(8)), np.sort(np.eye(8)))
  finally:
    jax.config.update(name, before)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("content", [b"", b"no program", None])
def test_a_broken_file_is_replaced(process, cache, content):
  process()
  (file,) = (cache / "programs").iterdir()
  half = file.read_bytes()[:-99]
  file.write_bytes(half if content is None else content)
  assert [process(), process()] == [1, 0]


def test_a_flipped_bit_is_noticed(process, cache):
  process()
  (file,) = (cache / "programs").iterdir()
  content = bytearray(file.read_bytes())
  content[len(content) // 5] ^= 1
  file.write_bytes(content)
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
  def files():
    return {file.name: file.stat().st_size for file in (cache / "programs").iterdir()}

  process()
  (used,) = files()
  process(key="b")
  before = files()
  for name in before:  # a file system's clock may be coarse
    os.utime(cache / "programs" / name, (1, 1))
  process()
  limit = sum(before.values()) * 5 // 4
  monkeypatch.setattr("experiments.training.programs._MOST_BYTES", limit)
  process(key="c")
  assert len(files()) == 2 and before.keys() & files().keys() == {used}
