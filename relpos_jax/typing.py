"""Array types, and the letters for axes.

A letter means the same in every annotation, local name and einsum.

B batch, T queries, S keys, N heads, K key heads, H head width, D model width, R
rows of a relation's table, E edge labels, F edge features or feed-forward width, V
vocabulary or width of values, L padded sentence length, W beam width, M edges of a list
or tokens read at once, G graphs of a row or query heads that share a key head, C
classes, P width of the second query of `ContentBias`.
"""

from typing import TYPE_CHECKING, Any, Literal

from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Integer, Key, PyTree, Shaped

__all__ = [
  "Array",
  "ArrayLike",
  "Beyond",
  "Bool",
  "Float",
  "ImplementationName",
  "Int",
  "Integer",
  "Key",
  "Leaf",
  "PyTree",
  "Shaped",
  "WeightsName",
]

# A field of a relation: an array, or what JAX puts in its place, such as a sharding.
Leaf = Any

if TYPE_CHECKING:
  Beyond = Literal["clip", "zero"]
  ImplementationName = Literal[
    "reference",
    "per_position",
    "skew",
    "projected",
    "chunked",
    "pallas_gpu",
    "mosaic_gpu",
  ]
  WeightsName = Literal["softmax", "silu"]
else:
  # Type checkers get the types above. The operator checks names itself.
  Beyond = str
  ImplementationName = str
  WeightsName = str
