"""The operator: one function for every relation and every implementation."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from relpos_jax.attention import per_position, projected, reference, softmax
from relpos_jax.attention.inputs import Inputs, gather_inputs
from relpos_jax.attention.relations import RelativePositions
from relpos_jax.typing import Array, ArrayLike

# What `implementation=` may name.
IMPLEMENTATIONS: Mapping[str, Callable[[Inputs], Array]] = {
  "reference": reference.attention,
  "per_position": per_position.attention,
  "projected": projected.attention,
}


def dot_product_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  bias: ArrayLike | None = None,
  mask: ArrayLike | None = None,
  *,
  relations: RelativePositions | None = None,
  scale: ArrayLike | None = None,
  is_causal: bool = False,
  query_positions: ArrayLike | None = None,
  key_positions: ArrayLike | None = None,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
  dropout_rate: float = 0.0,
  dropout_key: Array | None = None,
  implementation: str | None = None,
) -> Array:
  r"""Attention with a relation a_ij between every query i and key j.

  $$e_{ij} = s\, q_i \cdot (k_j + a^K_{ij}) \qquad
    z_i = \sum_j \mathrm{softmax}_j(e_{ij} + b_{ij}) (v_j + a^V_{ij})$$

  Shaw et al. 2018, equations 3 and 4. With `relations=None` it is `jax.nn.dot_product_attention`.
  A query that sees no key gets zero output and zero gradient, with relations or without.

  Args:
    query: `[B, T, N, H]`, or `[T, N, H]` without a batch (then B is absent everywhere below).
    key: `[B, S, K, H]`; N is a multiple of K: consecutive query heads share a key head.
    value: `[B, S, K, H]`.
    bias: added to the scaled logits, broadcastable to `[B, N, T, S]`.
    mask: bool, True where the key may be seen, broadcastable to `[B, N, T, S]`.
    relations: what a_ij is.
    scale: factor of the content and of the relative term, `H**-0.5` by default.
    is_causal: hide the keys whose position is later than the query's.
    query_positions: integers `[B, T]` or `[T]`, `arange(T)` by default. Any integers.
    key_positions: integers `[B, S]` or `[S]`, `arange(S)` by default. Mask unused slots.
    query_segment_ids: integers `[B, T]` or `[T]`; a query sees its own segment's keys.
    key_segment_ids: integers `[B, S]` or `[S]`, given together with the queries'.
    dropout_rate: the share of weights dropped, the same ones for v_j and aV_ij.
    dropout_key: `jax.random.key`, needed where something is dropped.
    implementation: a name forces it; None picks the fastest.

  Returns:
    `[B, T, N, H]`, in the value's dtype. Softmax and sums of weights are in float32, or in
    float64 for float64 inputs (without relations as in jax.nn: always in float32).

  Raises:
    ValueError: an argument is wrong, or `implementation` is not a known name.

  >>> q = k = v = jnp.ones((2, 10, 8, 64))
  >>> table = jnp.ones((2 * 3 + 1, 64))
  >>> dot_product_attention(q, k, v, relations=RelativePositions(table, table)).shape
  (2, 10, 8, 64)
  """
  if implementation is not None and implementation not in IMPLEMENTATIONS:
    known = ", ".join(IMPLEMENTATIONS)
    raise ValueError(f"implementation is {implementation!r}; want None or one of {known}")
  inputs = gather_inputs(
    query,
    key,
    value,
    bias,
    mask,
    relations=relations,
    scale=scale,
    is_causal=is_causal,
    query_positions=query_positions,
    key_positions=key_positions,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
    dropout_rate=dropout_rate,
    dropout_key=dropout_key,
  )
  if relations is None and dropout_rate == 0:
    output = _plain(inputs)
  else:
    output = IMPLEMENTATIONS[implementation or _fastest(inputs)](inputs)
  return output.reshape(jnp.shape(query))


def attention_weights(
  query: ArrayLike,
  key: ArrayLike,
  bias: ArrayLike | None = None,
  mask: ArrayLike | None = None,
  *,
  relations: RelativePositions | None = None,
  scale: ArrayLike | None = None,
  is_causal: bool = False,
  query_positions: ArrayLike | None = None,
  key_positions: ArrayLike | None = None,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
) -> Array:
  """The weights p_ij of `dot_product_attention`, before dropout, to look at.

  Takes its arguments.

  Returns:
    `[B, N, T, S]` (or `[N, T, S]`), float32, or float64 for float64 inputs. A row sums to one, or
    to zero where the query sees no key.

  Raises:
    ValueError: an argument is wrong.

  >>> q = k = jnp.ones((2, 4, 1, 8))
  >>> attention_weights(q, k, is_causal=True)[0, 0]
  Array([[1.        , 0.        , 0.        , 0.        ],
         [0.5       , 0.5       , 0.        , 0.        ],
         [0.33333334, 0.33333334, 0.33333334, 0.        ],
         [0.25      , 0.25      , 0.25      , 0.25      ]], dtype=float32)
  """
  inputs = gather_inputs(
    query,
    key,
    key,
    bias,
    mask,
    relations=relations,
    scale=scale,
    is_causal=is_causal,
    query_positions=query_positions,
    key_positions=key_positions,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
  )
  weights = softmax.attention_weights(inputs, projected.relative_logits)
  return weights.reshape(weights.shape[4 - jnp.ndim(query) :])


def _fastest(inputs: Inputs) -> str:
  """The faster of the two that support any call, forward and backward, as measured on CPUs.

  Beside plain attention of 16 to 64 tokens `per_position` takes 1.5 to 1.8 times as long and
  `projected` 2.0 to 2.2 times; from 128 tokens on `projected` wins. It also wins earlier where the
  vectors that `per_position` gathers, [B or 1, T, S, 1 or N, H], outgrow the weights, [B, N, T, S].
  """
  if inputs.relations is None:  # no relative term, nothing to choose between
    return "reference"
  batch, _, heads, width = inputs.query.shape
  label_batch = max(len(inputs.query_positions), len(inputs.key_positions))
  table_heads = max(table.shape[1] for table in jax.tree.leaves(inputs.relations))
  gathered_is_small = label_batch * table_heads * width <= batch * heads
  return "per_position" if inputs.key.shape[1] <= 64 and gathered_is_small else "projected"


def _plain(inputs: Inputs) -> Array:
  """jax.nn's attention, and zero for a query that sees no key, where jax.nn averages the values."""
  visible = inputs.visible()
  arrays = inputs.query, inputs.key, inputs.value, inputs.bias, visible
  output = jax.nn.dot_product_attention(*arrays, scale=inputs.scale)  # pyright: ignore
  if visible is None:
    return output
  sees_a_key_BTN1 = jnp.moveaxis(visible.any(-1, keepdims=True), 1, 2)
  return jnp.where(sees_a_key_BTN1, output, 0)
