"""Array types, and the letters for axes.

A letter has these meanings in annotations, local names and einsums. Where it has
another one, the docstring there says so.

    B  batch
    T  queries
    S  keys
    N  heads
    K  key heads
    G  query heads that share a key head; in batches of graphs, graphs of a row
    H  head width
    P  width of the second query of `ContentBias`; in decoding, length of prompts
    V  width of values; in models and decoding, vocabulary
    D  model width
    R  rows of a relation's table
    E  edge labels
    F  edge features; in feed-forward layers, hidden width
    M  edges of a list; in decoding, tokens that are read at once
    L  padded sentence length
    W  beam width; in a rolling cache, tokens of the window
    C  classes; in attention, columns; in beam search, candidates
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
