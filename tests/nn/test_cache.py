"""The key-value cache: slots, positions and overflow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax.nn.cache import KVCache, empty_cache

append = jax.jit(KVCache.append)


def tokens(batch_size: int, num_tokens: int, start: float):
  size = batch_size * num_tokens * 2
  key = start + np.arange(size, dtype=np.float32).reshape(batch_size, num_tokens, 1, 2)
  return jnp.asarray(key), jnp.asarray(-key)


def test_tokens_stand_one_after_another_whatever_their_positions():
  first, second = tokens(2, 2, 0.0), tokens(2, 1, 100.0)
  cache = empty_cache(2, 4, num_heads=1, head_width=2)
  cache = append(cache, *first, jnp.array([[-1, 0], [7, -1]]))
  cache = append(cache, *second, jnp.array([[1], [8]]))
  assert cache.positions.tolist() == [[-1, 0, 1, -1], [7, -1, 8, -1]]
  assert cache.filled.tolist() == [[False, True, True, False], [True, False, True, False]]
  assert cache.length.tolist() == [3, 3]
  np.testing.assert_array_equal(cache.key[:, :3], np.concatenate([first[0], second[0]], axis=1))
  np.testing.assert_array_equal(cache.value, -cache.key)


def test_rows_of_unequal_length_each_go_on_where_they_are():
  cache = empty_cache(2, 3, num_heads=1, head_width=2)._replace(length=jnp.array([2, 0]))
  cache = append(cache, *tokens(2, 1, 5.0), jnp.array([[4], [6]]))
  assert cache.positions.tolist() == [[-1, -1, 4], [6, -1, -1]]
  np.testing.assert_array_equal(cache.key[0, 2, 0], [5.0, 6.0])
  np.testing.assert_array_equal(cache.key[1, 0, 0], [7.0, 8.0])


def test_overflow_is_refused():
  cache = empty_cache(2, 3, num_heads=1, head_width=2)
  cache = append(cache, *tokens(2, 2, 0.0), jnp.array([[0, 1], [0, 1]]))
  with pytest.raises(ValueError, match="cache of 3 slots holds 2 tokens: no room for 2"):
    cache.append(*tokens(2, 2, 0.0), jnp.array([[2, 3], [2, 3]]))


def test_tokens_are_kept_in_the_caches_dtype():
  cache = empty_cache(2, 3, num_heads=1, head_width=2, dtype=jnp.bfloat16)
  cache = append(cache, *tokens(2, 1, 0.0), jnp.zeros((2, 1), int))
  assert cache.key.dtype == cache.value.dtype == jnp.bfloat16
