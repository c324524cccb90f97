"""The shape alphabet: one letter means one thing in every annotation, local name and einsum.

B batch, T queries, S keys, N heads, K key heads, H head width, D model width, R relation rows,
E edge labels, F edge features or feed-forward width, V vocabulary, L padded sentence length,
W beam width, M edges of a list, or slots that are filled at once, G graphs of a row, C classes,
P width of the second query of `ContentBias`.
"""

from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Integer, Key, PyTree, Shaped

__all__ = ["Array", "ArrayLike", "Bool", "Float", "Int", "Integer", "Key", "PyTree", "Shaped"]
