"""A small call of ones: tests change its arguments, one at a time."""

import numpy as np

from relpos_jax import RelativePositions, dot_product_attention

QUERY = np.ones((2, 5, 4, 8), np.float32)
KEY = np.ones((2, 7, 2, 8), np.float32)
TABLE = np.ones((5, 8), np.float32)
RELATIONS = RelativePositions(TABLE, TABLE)


def call(query=QUERY, key=KEY, value=KEY, relations=RELATIONS, **options):
  return dot_product_attention(query, key, value, relations=relations, **options)
