"""The shape alphabet.

One letter means one thing in every annotation, local name and einsum.

B batch, T queries, S keys, N heads, K key heads, H head width, D model width, R
relation rows, E edge labels, F edge features or feed-forward width, V vocabulary, L
padded sentence length, W beam width, M edges of a list, or slots that are filled at
once, G graphs of a row, C classes, P width of the second query of `ContentBias`.
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
  ]
  WeightsName = Literal["softmax", "silu"]
else:
  # Editors say what users give. In a program, trees of shardings, axes or names have
  # the structure of a relation, too, and the operator itself refuses another word.
  Leaf = Any
  Beyond = str
  ImplementationName = str
  WeightsName = str
