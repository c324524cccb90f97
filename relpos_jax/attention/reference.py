"""Attention with all weights [B, N, T, S] in memory, in three implementations.

`attention` is Shaw et al. 2018, equations 3 and 4, on gathered [T, S, H] vectors: slow
and simple, for tests to compare with. `per_position` is section 3.3. `projected`
multiplies queries by the tables first and needs no [T, S, H] vectors. The three differ
only in how a relation computes its terms of the logits and of the output. For a fourth
implementation, skew.py calls `attention` with two functions of its own.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from relpos_jax.attention import band, dropout, masks
from relpos_jax.attention.inputs import Inputs, is_symbolic
from relpos_jax.attention.lookup import product
from relpos_jax.attention.partitioned import target_platform
from relpos_jax.attention.relation import Relation, VectorRelation
from relpos_jax.typing import Array, Float

# Functions that compute a relation's term of the logits, before the scale, and its term
# of the output, from the weights. They return None if the relation has no such term.
Logits = Callable[[Inputs, Relation], Array | None]
Values = Callable[[Inputs, Relation, Array], Array | None]


def gathered_logits(inputs: Inputs, relation: Relation) -> Array | None:
  """Computes a relation's term of the logits from the gathered a_ij of all pairs."""
  return relation.gathered_logits(inputs.queries, inputs.keys)


def gathered_values(inputs: Inputs, relation: Relation, weights: Array) -> Array | None:
  """Computes a relation's term of the output from the gathered a_ij of all pairs."""
  return relation.gathered_values(weights, inputs.queries, inputs.keys)


def attention(
  inputs: Inputs,
  logits_of: Logits = gathered_logits,
  values_of: Values = gathered_values,
) -> Array | tuple[Array, Array]:
  """Computes z_i = sum_j p_ij (v_j + aV_ij), and the residual if asked for it."""
  weights, residual = attention_weights(inputs, logits_of)
  output = _weighted_sum(inputs, weights, values_of)
  return output if residual is None else (output, residual)


def _weighted_sum(
  inputs: Inputs, weights: Array, values_of: Values
) -> Float[Array, "B T N V"]:
  """Computes the output from the weights [B, N, T, S], with dropout."""
  if inputs.dropout_seeds is not None:
    _, _, rows, columns = jnp.ogrid[:1, :1, : weights.shape[2], : weights.shape[3]]
    seeds = inputs.dropout_seeds[..., None, None]
    is_kept = dropout.keep(seeds, rows, columns, inputs.dropout_rate)
    weights = jnp.where(is_kept, weights / (1 - inputs.dropout_rate), 0)
  batch, num_heads, num_queries, num_keys = weights.shape
  split_shape = batch, *_split_heads(inputs), num_queries, num_keys
  split_weights = weights.reshape(split_shape)
  split_weights = split_weights.astype(inputs.value.dtype)
  if has_few_queries(inputs):
    output = product("BSKV,BK...TS->BK...TV", inputs.value, split_weights)
  else:
    output = product("BK...TS,BSKV->BK...TV", split_weights, inputs.value)
  # Swaps axes only now: XLA's CPU compiler fuses the softmax only with products that
  # transpose nothing.
  width = inputs.value.shape[3]
  output = output.reshape(batch, num_heads, num_queries, width).swapaxes(1, 2)
  for relation in inputs.relations:
    term = values_of(inputs, relation, weights)
    if term is not None:
      output += term
  return output.astype(inputs.value.dtype)


def attention_weights(inputs: Inputs, logits_of: Logits) -> tuple[Array, Array | None]:
  """Computes p_ij = softmax_j(logits), [B, N, T, S]; zero for a fully masked query.

  With `weights="silu"`, p_ij = SiLU(logit) / n. If the call asks for it, also returns
  the residual [B, T, N]: the log-sum-exp of the logits, sinks included, or -inf for a
  fully masked query.
  """
  logits = _masked_logits(inputs, logits_of)
  if inputs.silu_divisor is not None:
    # SiLU of 0 is 0: a bias of -inf is masked, too, and makes no NaN.
    logits = jnp.where(logits <= masks.LOWEST / 2, 0, logits)
    divisor = jnp.asarray(inputs.silu_divisor, logits.dtype)
    return jax.nn.silu(logits) / divisor, None
  highest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
  # Masked logits are far below this. If all are masked, their powers are 0. Otherwise
  # they would be 1, or NaN for logits of -inf.
  maximum = jnp.maximum(highest, masks.LOWEST / 2)
  sinks = None
  if inputs.sinks is not None:
    sinks = inputs.sinks[None, :, None, None]
    maximum = jnp.maximum(maximum, jax.lax.stop_gradient(sinks))
  powers = jnp.exp(logits - maximum)
  total = powers.sum(-1, keepdims=True)
  if sinks is not None:
    total += jnp.exp(sinks - maximum)
  # For a masked query, prevents 0 / 0. Other totals are 1 or more: one power is 1.
  total = jnp.maximum(total, 0.5)
  weights, residual = powers / total, None
  if inputs.return_residual:
    # The two are added only here: in the weights, float32 would lose log(total) next to
    # a large maximum.
    is_masked = highest <= masks.LOWEST / 2
    residual = jnp.where(is_masked, -jnp.inf, maximum + jnp.log(total))
    residual = residual[..., 0].swapaxes(1, 2)
  return weights, residual


def _masked_logits(inputs: Inputs, logits_of: Logits) -> Float[Array, "B N T S"]:
  """Computes the logits, in the accumulation dtype; masked ones are `LOWEST`.

  It starts from q_i . k_j, adds the terms of scaled relations, and multiplies the sum
  by the scale. Then it adds the other terms and the bias, and applies the soft cap.
  """
  batch, num_queries, heads, width = inputs.query.shape
  split_query = inputs.query.reshape(batch, num_queries, *_split_heads(inputs), width)
  if has_few_queries(inputs):
    split_logits = product("BSKH,BTK...H->BK...TS", inputs.key, split_query)
  else:
    split_logits = product("BTK...H,BSKH->BK...TS", split_query, inputs.key)
  logits = split_logits.reshape(batch, heads, num_queries, -1)
  unscaled = []
  for relation in inputs.relations:
    term = logits_of(inputs, relation)
    if term is not None and relation.is_scaled:
      logits += term
    elif term is not None:
      unscaled.append(term)
  logits *= jnp.asarray(inputs.scale, logits.dtype)
  for term in unscaled:
    logits += term
  bias, mask = inputs.bias_of_each(), inputs.pair_mask()
  if bias is not None:
    logits += bias.astype(logits.dtype)
  logits = masks.cap(logits, inputs.soft_cap)
  return logits if mask is None else jnp.where(mask, logits, masks.LOWEST)


def _split_heads(inputs: Inputs) -> tuple[int, ...]:
  """Returns the numbers of key heads, and of query heads for each.

  On a CPU it leaves out the second number if it is 1: XLA would not fuse products with
  an axis of size 1. For a TPU, the compiler needs that axis, to move a sixth less. On a
  GPU, nothing was timed without it.
  """
  heads, key_heads = inputs.query.shape[2], inputs.key.shape[2]
  if heads == key_heads and target_platform() == "cpu":
    return (heads,)
  return key_heads, heads // key_heads


def has_few_queries(inputs: Inputs) -> bool:
  """Returns whether at most 8 queries use each key head, as in decoding, on a CPU.

  In such a call, keys and values have to be the first operand of their products. XLA's
  CPU compiler would transpose a second operand. On other devices it returns False.
  """
  group = inputs.query.shape[2] // inputs.key.shape[2]
  is_known = target_platform() == "cpu" and not is_symbolic(inputs.query)
  return is_known and inputs.query.shape[1] * group <= 8


def projected_logits(inputs: Inputs, relation: Relation) -> Array | None:
  """Computes a relation's term of the logits: project on its table, then look up."""
  return relation.logits(inputs.queries, inputs.keys)


def projected_values(
  inputs: Inputs, relation: Relation, weights: Array
) -> Array | None:
  """Computes a relation's term of the output: sum weights by row, then project."""
  return relation.values(weights, inputs.queries, inputs.keys)


def projected(inputs: Inputs) -> Array | tuple[Array, Array]:
  """Computes attention with projections on the tables, and lookups by label."""
  used = band.without_unused_rows(inputs)
  return attention(used, projected_logits, projected_values)


def per_position(inputs: Inputs) -> Array | tuple[Array, Array]:
  """Computes each relative term by T batched products, one per query position.

  All sequences and heads share the vectors [S, H] of query position i. So a relative
  term is T products of (B N, H) with (H, S). Shaw et al. 2018, section 3.3. Terms
  that do not multiply queries by vectors are computed as in `attention`.
  """
  return attention(inputs, _logits_by_position, _values_by_position)


def _logits_by_position(inputs: Inputs, relation: Relation) -> Array | None:
  if not isinstance(relation, VectorRelation) or relation.is_by_key:
    return gathered_logits(inputs, relation)
  vectors, table = relation.content(inputs.queries, inputs.keys)
  if table is None:
    return None
  query_TNBH = vectors.transpose(1, 2, 0, 3)
  a_BTSNH = relation.gather(table, inputs.queries, inputs.keys)
  logits_TNBS = _by_position("NBH,BSNH->NBS", query_TNBH, a_BTSNH)
  return logits_TNBS.transpose(2, 1, 0, 3)


def _values_by_position(
  inputs: Inputs, relation: Relation, weights: Array
) -> Array | None:
  if not isinstance(relation, VectorRelation):
    return gathered_values(inputs, relation, weights)
  if relation.value is None:
    return None
  weights_TNBS = weights.transpose(2, 1, 0, 3)
  a_BTSNH = relation.gather(relation.value, inputs.queries, inputs.keys)
  values_TNBH = _by_position("NBS,BSNH->NBH", weights_TNBS, a_BTSNH)
  return values_TNBH.transpose(2, 0, 1, 3)


def _by_position(subscripts: str, x: Array, a_BTSNH: Array) -> Array:
  """Computes a product for each of the T queries, the first axis of x."""
  # XLA's CPU compiler would fuse a transpose with the product next to it, which then
  # reads memory with strides. With the barrier, forward and backward take a sixth less.
  barrier = jax.lax.optimization_barrier
  products = jax.vmap(functools.partial(product, subscripts))
  return barrier(products(barrier(x), a_BTSNH.swapaxes(0, 1)))
