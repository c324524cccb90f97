"""A digest knows every bit and its place, and nothing of where the array lies."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import AS_USERS_DO
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from experiments.training import manifest
from experiments.training.manifest import device_sums, digests

DTYPES = ("float32", "bfloat16", "float16", "uint32", "int32", "int8", "bool", "complex64")


def random_bits(dtype, shape):
  rng = np.random.default_rng(0)
  if dtype == "bool":
    return rng.random(shape) > 0.5
  num_bytes = np.prod(shape, dtype=int) * jnp.dtype(dtype).itemsize
  return rng.integers(0, 256, num_bytes, np.uint8).view(jnp.dtype(dtype)).reshape(shape)


def digest(array):
  return digests({"": array})[""]


def halves(text):
  return text[:8], text[8:]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_flipped_bit_changes_both_halves(dtype):
  array = random_bits(dtype, (2, 3, 5))
  before = halves(digest(array))
  octets = array.reshape(-1).view(np.uint8)
  for bit in range(0, octets.size * 8, 8 if dtype == "bool" else 1):
    octets[bit // 8] ^= 1 << bit % 8
    first, second = halves(digest(array))
    assert first != before[0] and second != before[1]
    octets[bit // 8] ^= 1 << bit % 8
  assert halves(digest(array)) == before


def test_damage_of_many_words_changes_it():
  array = random_bits("uint32", (64, 96))
  rng = np.random.default_rng(1)
  changed = [
    array.T.copy(),
    np.roll(array, 1, 0),
    np.roll(array, 1, 1),
    np.sort(array),
    array[::-1],
  ]
  changed += [np.where(np.arange(96) < 48, 0, array), array | 2**30, array ^ 2**31]
  for _ in range(500):
    i, j = rng.choice(array.size, 2, replace=False)
    swapped, signs, moved = (array.reshape(-1).copy() for _ in range(3))
    swapped[[i, j]] = swapped[[j, i]]
    signs[[i, j]] ^= 2**31
    moved[i] += 1
    moved[j] -= 1
    changed += [swapped, signs, moved]
  found = [digest(np.asarray(other, np.uint32)) for other in [array, *changed]]
  assert len({half for half, _ in map(halves, found)}) > len(found) - 2  # 32 bits may collide
  assert len(set(found)) == len(found)


def test_it_is_one_pass_that_writes_nothing():
  lowered = device_sums.lower(jnp.zeros((256, 512)))
  memory = lowered.compile(compiler_options=AS_USERS_DO).memory_analysis()
  assert memory.temp_size_in_bytes < 1024


@pytest.mark.parametrize("dtype", DTYPES)
def test_host_and_device_agree(dtype):
  array = random_bits(dtype, (3, 4, 5))
  on_device = "".join(f"{int(half):08x}" for half in device_sums(jnp.asarray(array)))
  assert on_device == digest(array) == digest(jnp.asarray(array))


def test_a_wide_type_has_two_words_an_element(float64):
  array = np.random.default_rng(0).normal(size=(3, 4))
  on_device = "".join(f"{int(half):08x}" for half in device_sums(jnp.asarray(array)))
  assert on_device == digest(array) != digest(array.reshape(-1)[::-1].copy())


@pytest.mark.parametrize(
  "shape, names, spec",
  [
    ((8,), "a", ("a",)),
    ((2, 4), "ab", ("b", "a")),
    ((2, 4), "ab", (None, None, ("a", "b"))),
    ((2, 4), "ab", (None, "b")),
    ((4,), "a", ()),
  ],
)
def test_all_shardings_have_the_same_and_only_sums_travel(shape, names, spec, monkeypatch):
  array = random_bits("float32", (8, 16, 24))
  mesh = jax.make_mesh(
    shape, tuple(names), (AxisType.Auto,) * len(shape), devices=jax.devices()[: np.prod(shape)]
  )
  sharded = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
  wanted = digest(array)
  monkeypatch.setattr(manifest, "_SMALL", 0)
  assert digest(sharded) == wanted
  text = device_sums.lower(sharded).compile().as_text()
  sizes = re.findall(r"= \(?\w+\[([\d,]*)\]\S* (?:all|collective|reduce-scatter)", text)
  assert bool(sizes) == bool(spec)
  assert all(np.prod([int(n) for n in size.split(",") if n]) <= mesh.size for size in sizes)
