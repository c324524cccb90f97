"""The tables of published relations by distance have the rows of the published code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import papers
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from relpos_jax import DistanceBias, KeyBias, LinearBias, RelativePositions

pytestmark = pytest.mark.usefixtures("float64")


def t5_bucket(distance, num_buckets, max_distance, bidirectional=True):
  """Returns the bucket of a distance, in the float32 of Mesh TensorFlow and T5X."""
  offset, n = 0, -distance
  if bidirectional:
    num_buckets //= 2
    offset, n = num_buckets * (n < 0), abs(n)
  n = max(n, 0)
  max_exact = num_buckets // 2
  if n < max_exact:
    return offset + n
  ratio = np.log(np.float32(n) / np.float32(max_exact) + np.finfo(np.float32).eps)
  ratio /= np.float32(np.log(max_distance / max_exact))
  large = max_exact + int(ratio * np.float32(num_buckets - max_exact))
  return offset + min(large, num_buckets - 1)


def deberta_bucket(distance, num_buckets, max_distance):
  """Returns the bucket of a distance, as DeBERTa's code in float32: query minus key."""
  bucket, mid = -distance, num_buckets // 4
  if abs(distance) > mid:
    far = np.float32(abs(distance) / mid)
    farthest = np.float32((max_distance - 1) / mid)
    log_pos = np.ceil(np.log(far) / np.log(farthest) * np.float32(mid - 1)) + mid
    bucket = int(log_pos * np.sign(bucket))
  return min(max(bucket + num_buckets // 2, 0), num_buckets - 1)


causal_t5 = functools.partial(DistanceBias.t5, bidirectional=False)
causal_t5_bucket = functools.partial(t5_bucket, bidirectional=False)


@pytest.mark.parametrize(
  "make, bucket, num_buckets, max_distance",
  [
    (DistanceBias.t5, t5_bucket, 32, 128),
    (DistanceBias.t5, t5_bucket, 9, 6),
    (causal_t5, causal_t5_bucket, 32, 128),
    (causal_t5, causal_t5_bucket, 9, 6),
    (RelativePositions.deberta, deberta_bucket, 512, 512),
    (RelativePositions.deberta, deberta_bucket, 4, 3),
    (RelativePositions.deberta, deberta_bucket, 8, 40),
    (KeyBias.deberta, deberta_bucket, 512, 512),
  ],
)
def test_rows_are_the_buckets_of_the_published_code(
  make, bucket, num_buckets, max_distance
):
  buckets = jnp.asarray(np.random.default_rng(0).normal(size=(num_buckets, 3)))
  distances = np.arange(-700, 700)
  wanted = [bucket(int(x), num_buckets, max_distance) for x in distances]
  relation = make(buckets, max_distance=max_distance)
  (table,) = jax.tree.leaves(relation)
  rows = relation.labels(jnp.zeros(1, int), jnp.asarray(distances))[0]
  assert_array_equal(table[rows], buckets[jnp.asarray(wanted)])
  assert len(set(wanted)) > num_buckets // 2


def test_alibi_has_the_slopes_of_the_paper_and_its_code():
  for n in range(1, 40):
    assert_allclose(LinearBias.alibi(n).slopes, papers.alibi_slopes(n), rtol=1e-12)


def test_no_head_has_no_slopes():
  with pytest.raises(ValueError, match="num_heads is 0; want one or more"):
    LinearBias.alibi(0)
