"""Attention with its [B, N, T, S] weights in memory, and the paper's two ways to add
relations.

`attention` is Shaw et al. 2018, equations 3 and 4, on gathered [T, S, H] vectors: slow
and simple, for tests to compare with. `per_position` is section 3.3. Skew and projected
differ in the same two functions: a relation's terms of the logits and of the output.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from relpos_jax.attention import dropout, masks
from relpos_jax.attention.inputs import Inputs, is_symbolic
from relpos_jax.attention.partitioned import target_platform
from relpos_jax.attention.relations import (
  ContentBias,
  FunctionBias,
  KeyBias,
  LinearBias,
  Numbers,
  Relation,
  Unscaled,
  Vectors,
)
from relpos_jax.typing import Array, Float

Logits = Callable[[Inputs, Relation], Array]  # computes a relation's term of the logits
Values = Callable[[Inputs, Vectors, Array], Array]  # computes its term of the output


def relative_logits(inputs: Inputs, relation: Relation) -> Float[Array, "#B #N T S"]:
  """Computes a relation's term of the logits, before any scale: q_i . aK_ij for most."""
  match relation:
    case LinearBias():
      keys, queries = (
        inputs.key_positions[:, None, None],
        inputs.query_positions[:, None, :, None],
      )
      distance = (keys - queries).astype(relation.slopes.dtype)
      return -relation.slopes[None, :, None, None] * jnp.abs(distance)
    case FunctionBias():
      return _function_terms(inputs, relation)
    case _ if isinstance(relation, Numbers):
      return jnp.moveaxis(_vectors(relation.table, inputs.edges(relation)), -1, 1)
  axes, x, table = content(inputs, relation)
  return product(f"{axes},BTSNH->BNTS", x, _vectors(table, inputs.edges(relation)))


def _function_terms(
  inputs: Inputs, relation: FunctionBias
) -> Float[Array, "#B #N T S"]:
  """Computes a function of every pair, once if no sequence has data of its own."""
  of_pair = functools.partial(relation.function, relation.params)
  of_row = jax.vmap(of_pair, (None, 0, None, 0, 0))
  of_sequence = jax.vmap(of_row, (0, None, 0, None, 0))
  data = inputs.query_positions, inputs.key_positions
  data += relation.of_query, relation.of_key, relation.of_pair
  leaves, structure = jax.tree.flatten(data)
  batch = max(map(len, leaves))
  leaves = [jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in leaves]
  terms = jax.vmap(of_sequence)(*jax.tree.unflatten(structure, leaves))
  terms = terms.astype(jnp.promote_types(inputs.query.dtype, jnp.float32))
  return terms[:, None] if terms.ndim == 3 else jnp.moveaxis(terms, -1, 1)


def relative_values(
  inputs: Inputs, relation: Vectors, weights: Array
) -> Float[Array, "B T N V"]:
  """Computes sum_j p_ij aV_ij from the weights [B, N, T, S]."""
  a_BTSNH = _vectors(relation.value, inputs.edges(relation))
  return product("BNTS,BTSNH->BTNH", weights, a_BTSNH)


def content(
  inputs: Inputs, relation: Vectors | ContentBias | KeyBias
) -> tuple[str, Array, Array]:
  """Returns the vectors that rows of the relation's table multiply, their axes, and the table."""
  match relation:
    case KeyBias():
      group = inputs.query.shape[2] // inputs.key.shape[2]
      return "BSNH", jnp.repeat(inputs.key, group, axis=2), relation.table
    case ContentBias():
      return "BTNH", relation.query, relation.table
    case _:
      return "BTNH", inputs.query, relation.key


def _vectors(table: Array, edges: Array) -> Float[Array, "#B T S #N *H"]:
  """Returns a_ij: the row of each label, zero where it is -1, or features times kernel."""
  if jnp.issubdtype(edges.dtype, jnp.floating):
    return jnp.einsum("BTSR,RNH->BTSNH", edges, table)
  is_related = jnp.expand_dims(edges >= 0, (*range(3, 2 + table.ndim),))
  return jnp.where(is_related, table[edges], 0)


def attention(
  inputs: Inputs,
  logits_of: Logits = relative_logits,
  values_of: Values = relative_values,
) -> Array | tuple[Array, Array]:
  """Computes z_i = sum_j p_ij (v_j + aV_ij), with dropout of the p_ij, and any residual."""
  weights, residual = attention_weights(inputs, logits_of)
  output = weighted_sum(inputs, weights, values_of)
  return output if residual is None else (output, residual)


def weighted_sum(
  inputs: Inputs, weights: Array, values_of: Values
) -> Float[Array, "B T N V"]:
  """Computes the output from the weights [B, N, T, S], of which some are dropped."""
  if inputs.dropout_seeds is not None:
    _, _, rows, columns = jnp.ogrid[:1, :1, : weights.shape[2], : weights.shape[3]]
    seeds = inputs.dropout_seeds[..., None, None]
    kept = dropout.keep(seeds, rows, columns, inputs.dropout_rate)
    weights = jnp.where(kept, weights / (1 - inputs.dropout_rate), 0)
  batch, _, num_queries, num_keys = weights.shape
  weights_BKGTS = weights.reshape(batch, inputs.key.shape[2], -1, num_queries, num_keys)
  weights_BKGTS = weights_BKGTS.astype(inputs.value.dtype)
  output = product(
    "BKGTS,BSKV->BTKGV", weights_BKGTS, inputs.value, has_few_queries(inputs)
  )
  output = output.reshape(*inputs.query.shape[:3], inputs.value.shape[3])
  for relation in inputs.value_terms():
    output += values_of(inputs, relation, weights)
  return output.astype(inputs.value.dtype)


def attention_weights(inputs: Inputs, logits_of: Logits) -> tuple[Array, Array | None]:
  """Computes p_ij = softmax_j(logits), [B, N, T, S]; zero for a query that sees no key.

  Also returns the residual [B, T, N] if the call asks for it: the logarithm of a
  query's sum of exp(logit), sinks included, -inf without a key.
  """
  logits, hides = masked_logits(inputs, logits_of), may_hide(inputs)
  if hides:  # a query whose keys are all hidden is not NaN
    logits = jnp.maximum(logits, masks.LOWEST)
  with_sinks = logits
  if inputs.sinks is not None:
    sinks = jnp.broadcast_to(inputs.sinks[:, None, None], (*logits.shape[:3], 1))
    with_sinks = jnp.concatenate([logits, sinks], axis=-1)
  weights, residual = jax.nn.softmax(with_sinks)[..., : logits.shape[3]], None
  # Not from their maximum, in which XLA may drop a NaN on a CPU.
  sees_none = (logits <= masks.LOWEST / 2).all(-1, keepdims=True) if hides else False
  if inputs.return_residual:
    total = jax.nn.logsumexp(with_sinks, axis=-1, keepdims=True)
    residual = jnp.where(sees_none, -jnp.inf, total)[..., 0].swapaxes(1, 2)
  return (jnp.where(sees_none, 0, weights) if hides else weights), residual


def may_hide(inputs: Inputs) -> bool:
  """Returns whether a key may be hidden from a query, by a mask or a number of -inf."""
  has_numbers = any(isinstance(x, Numbers | FunctionBias) for x in inputs.relations)
  return has_numbers or inputs.bias is not None or inputs.pair_mask() is not None


def masked_logits(inputs: Inputs, logits_of: Logits) -> Float[Array, "B N T S"]:
  """Computes scale * q_i . (k_j + aK_ij) + bias_ij in float32 or wider; masked ones are
  `LOWEST`.

  Relations without vectors add their own terms, before the scale or after it. Numbers
  of -inf stay.
  """
  batch, num_queries, heads, width = inputs.query.shape
  query_BTKGH = inputs.query.reshape(batch, num_queries, inputs.key.shape[2], -1, width)
  logits_BKGTS = product(
    "BTKGH,BSKH->BKGTS", query_BTKGH, inputs.key, has_few_queries(inputs)
  )
  logits = logits_BKGTS.reshape(batch, heads, num_queries, -1)
  terms = [
    x for x in inputs.relations if not isinstance(x, Vectors) or x.key is not None
  ]
  for relation in terms:
    if not isinstance(relation, Unscaled):
      logits += logits_of(inputs, relation)
  logits *= jnp.asarray(inputs.scale, logits.dtype)
  for relation in terms:
    if isinstance(relation, Unscaled):
      logits += logits_of(inputs, relation)
  if (bias := inputs.bias_of_each()) is not None:
    logits += bias.astype(logits.dtype)
  logits = masks.cap(logits, inputs.soft_cap)
  mask = inputs.pair_mask()
  return logits if mask is None else jnp.where(mask, logits, masks.LOWEST)


def product(subscripts: str, x: Array, y: Array, few: bool = False) -> Array:
  """Computes the einsum of x and y in x's dtype, accumulated in float32 or wider.

  With `few`, y is the first operand, and XLA's CPU compiler does not transpose a large
  y.
  """
  wide = jnp.promote_types(x.dtype, jnp.float32)
  if few:
    inputs, output = subscripts.split("->")
    swapped = ",".join(reversed(inputs.split(","))) + "->" + output
    return jnp.einsum(swapped, y.astype(wide), x.astype(wide))
  mixed = functools.partial(jnp.einsum, subscripts, preferred_element_type=wide)
  if x.dtype == wide:
    return mixed(x, y.astype(wide))

  # XLA lacks some of these products on CPUs, where float32 is no slower.
  def widened(x, y):
    return mixed(x.astype(wide), y.astype(wide))

  return jax.lax.platform_dependent(x, y.astype(x.dtype), cpu=widened, default=mixed)


def has_few_queries(inputs: Inputs) -> bool:
  """Returns whether, on a CPU, at most 8 queries share a key head, as in decoding."""
  group = inputs.query.shape[2] // inputs.key.shape[2]
  is_known = target_platform() == "cpu" and not is_symbolic(inputs.query)
  return is_known and inputs.query.shape[1] * group <= 8


def per_position(inputs: Inputs) -> Array | tuple[Array, Array]:
  """Computes attention with T batched products in each relative term.

  Batch elements and heads share the vectors [S, H] of query position i, so a relative
  term is T products of (B N, H) with (H, S). Shaw et al. 2018, section 3.3. Relations
  without vectors are added as in `attention`.
  """
  # Keeps a transpose out of the adjacent product. XLA's CPU compiler would fuse the two
  # into one with strided memory access; with the barrier, forward and backward are a
  # sixth faster.
  apart = jax.lax.optimization_barrier

  def by_position(subscripts, x, table, relation):
    products = jax.vmap(functools.partial(product, subscripts))
    return apart(
      products(apart(x), _vectors(table, inputs.edges(relation)).swapaxes(0, 1))
    )

  def logits_by_position(inputs, relation):
    if not isinstance(relation, Vectors):
      return relative_logits(inputs, relation)
    query_TNBH = inputs.query.transpose(1, 2, 0, 3)
    logits_TNBS = by_position("NBH,BSNH->NBS", query_TNBH, relation.key, relation)
    return logits_TNBS.transpose(2, 1, 0, 3)

  def values_by_position(inputs, relation, weights):
    weights_TNBS = weights.transpose(2, 1, 0, 3)
    values_TNBH = by_position("NBS,BSNH->NBH", weights_TNBS, relation.value, relation)
    return values_TNBH.transpose(2, 0, 1, 3)

  return attention(inputs, logits_by_position, values_by_position)
