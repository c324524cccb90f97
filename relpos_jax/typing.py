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

if TYPE_CHECKING:
  Leaf = ArrayLike
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
  # Type checkers get the types above. At run time, fields must take anything, since JAX
  # builds relations with shardings, axes or names as leaves. The operator checks names.
  Leaf = Any
  Beyond = str
  ImplementationName = str
  WeightsName = str
