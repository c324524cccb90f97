"""The operator: attention with any relation, by any implementation."""

# Without this import, `inspect.signature` would spell out every union.
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from relpos_jax.attention import masks, reference
from relpos_jax.attention.arrays import accumulation_dtype
from relpos_jax.attention.choice import CUDNN, IMPLEMENTATIONS, PLAIN, choose
from relpos_jax.attention.inputs import AttentionOptions, Inputs, gather_inputs
from relpos_jax.attention.partitioned import (
  FIRST_DERIVATIVES_ONLY,
  target_platform,
  with_automatic_axes,
)
from relpos_jax.attention.relations import Relations
from relpos_jax.typing import Array, ArrayLike, Float, ImplementationName, WeightsName


@overload
def dot_product_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  bias: ArrayLike | None = None,
  mask: ArrayLike | None = None,
  *,
  implementation: ImplementationName | None = None,
  return_residual: Literal[False] = False,
  **options: Unpack[AttentionOptions],
) -> Array: ...


@overload
def dot_product_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  bias: ArrayLike | None = None,
  mask: ArrayLike | None = None,
  *,
  implementation: ImplementationName | None = None,
  return_residual: Literal[True],
  **options: Unpack[AttentionOptions],
) -> tuple[Array, Array]: ...


def dot_product_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  bias: ArrayLike | None = None,
  mask: ArrayLike | None = None,
  *,
  relations: Relations | None = None,
  scale: ArrayLike | None = None,
  logits_soft_cap: float | None = None,
  sinks: ArrayLike | None = None,
  weights: WeightsName = "softmax",
  divisor: ArrayLike | None = None,
  is_causal: bool = False,
  query_positions: ArrayLike | None = None,
  key_positions: ArrayLike | None = None,
  query_offset: ArrayLike | None = None,
  query_seq_lengths: ArrayLike | None = None,
  key_value_seq_lengths: ArrayLike | None = None,
  local_window_size: int | tuple[int, int] | None = None,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
  dropout_rate: float = 0.0,
  dropout_key: ArrayLike | None = None,
  implementation: ImplementationName | None = None,
  return_residual: bool = False,
) -> Array | tuple[Array, Array]:
  """Computes attention with a relation a_ij between every query i and key j.

      e_ij = scale * q_i . (k_j + aK_ij)
      z_i = sum_j softmax_j(e_ij + bias_ij) (v_j + aV_ij)

  Shaw et al. 2018, equations 3 and 4. With `relations=None` it is
  `jax.nn.dot_product_attention`. A fully masked query gets zero output and zero
  gradient. B, T and S may be 0. As in jax.nn, a NaN or an infinity in a masked key or
  value may reach the result, since zero times NaN is NaN.

  Outside of `jax.jit`, JAX compiles a call once for its shapes and options. Changing
  `query_offset` does not recompile. Changing `scale` does not recompile on a CPU,
  unless `implementation` names a kernel. On other devices it may recompile, because a
  kernel is compiled for one scale.

  Args:
    query: `[B, T, N, H]`. Here and below, B stands for any number of batch axes. For
      example, `[T, N, H]` has none, and `[X, Y, T, N, H]` has two.
    key: `[B, S, K, H]`. N is a multiple of K: consecutive query heads share a key head.
    value: `[B, S, K, V]`, with any width V. Value tables have the same width.
    bias: floating numbers that are added to the scaled logits. Any rank that broadcasts
      to `[B, N, T, S]`. Entries below -1.2e38 mask the pair.
    mask: bool, True where a query attends to a key. Broadcasts like a bias.
    relations: `RelativePositions`, `EdgeLabels` or `EdgeFeatures`, which define a_ij.
      Or a term of the logits: `DistanceBias`, `LinearBias`, `ContentBias`, `KeyBias`,
      `LabelBias` or `FunctionBias`. Or a list of edges, `EdgeLabels.from_edges(...)`.
      Or a tuple of relations, to add their terms. For rotary positions, `rotate` the
      queries and keys.
    scale: factor of q_i . k_j, of q_i . aK_ij and of `KeyBias`. Default: `H**-0.5`.
    logits_soft_cap: c, to replace logits by c tanh(logits / c) (Gemma 2). As in
      tokamax, it applies after the scale, the relations and the bias, and before the
      masks. So a bias of -1e9 masks nothing.
    sinks: `[N]`, logits that take weight but have no value, as in gpt-oss: exp(sink) is
      added to the denominator of the softmax. Scale, soft cap and masks do not apply.
    weights: "softmax", or "silu": SiLU(logit) / n in place of a softmax over the keys
      (HSTU: Zhai et al. 2024, equation 2). Masked pairs have weight 0. "silu" takes no
      sinks and returns no residual.
    divisor: n of "silu", one number. Default: the number of keys S, which counts
      padding and the unused slots of a cache. With padding or unused slots, give a
      number that does not depend on them.
    is_causal: whether to mask the keys with later positions than the query.
    query_positions: integers `[B, T]` or `[T]`, `arange(T)` by default. The distances
      between queries and keys must fit in 32 bits. Traced positions may wrap around at
      2**31; their distances are still right. If several sequences are packed into one,
      give segment ids, but no positions: packing does not change the distances within a
      segment.
    key_positions: integers `[B, S]` or `[S]`, `arange(S)` by default. The caller must
      mask unused slots of a cache.
    query_offset: an integer or integers `[B]`, instead of positions: queries are at
      query_offset, query_offset + 1, ..., keys at 0, 1, ... Every implementation
      supports it. So prefer it for chunked prefill, decoding with a cache, and shards
      of a sequence. Within `jax.jit` a Python int is static. The range is -2**30 to
      2**30; for traced offsets, distances must fit in 32 bits. Without an offset or
      positions, a single query is at position 0, as in jax.nn. With `is_causal` it then
      attends only to the first key; if there are relations, a warning is issued.
    query_seq_lengths: integers `[B]`, or one for all. Queries past the length of their
      sequence get zero, as in jax.nn.
    key_value_seq_lengths: integers `[B]`, or one for all. Keys past the length of their
      sequence are masked.
    local_window_size: a distance, or the distances (left, right). Keys farther away are
      masked.
    query_segment_ids: integers `[B, T]` or `[T]`. A query attends to its own segment.
    key_segment_ids: integers `[B, S]` or `[S]`. Give both segment ids or neither.
    dropout_rate: the share of weights to drop, for v_j and aV_ij alike.
    dropout_key: `jax.random.key`, or an old `PRNGKey`. Needed if the rate is positive.
    implementation: a name, or None to choose one; `explain` says which one, and why.

      None chooses "chunked" for long sequences. On CPUs these have 512 keys, or 128 if
      the weights of all pairs take 16 MiB. Other relations than by distance, given
      positions and "silu" need the 16 MiB in any case. On other devices the weights
      take 1 GiB or more per device.

      A kernel or cuDNN is chosen only on a single H200, for causal self-attention in
      bfloat16 with head width 64. From 1,024 tokens on, it is the kernel "pallas_gpu".
      From 2,048 tokens on, it is cuDNN through jax.nn if the call has neither relations
      nor masks.

      The choice is for the devices of the mesh in context, or else for JAX's default
      device. If that is an H200, but the arrays are on the CPU, name "projected" or
      "skew".

      Kernels and cuDNN have only first derivatives, in reverse mode. The same holds for
      "chunked" if all relations go by distance. For forward mode or second derivatives,
      name "projected" or "skew".
    return_residual: whether to return the log-sum-exp of the logits, too, as in jax.nn.

  Returns:
    `[B, T, N, V]`, in the value's dtype. With `return_residual` also the log-sum-exp of
    the logits `[B, T, N]`, in float32 or float64, -inf for fully masked queries;
    `merge` needs it. Softmax and sums of weights are in float32, or in float64 for
    float64 inputs. Where jax.nn computes the call, they are always in float32.

  Raises:
    ValueError: an argument is wrong, or `implementation` is not a known name.
    NotImplementedError: `implementation` does not support this call. `explain` lists
      the implementations that do.

  >>> from relpos_jax import RelativePositions
  >>> q = k = v = jnp.ones((2, 10, 8, 64))
  >>> table = jnp.ones((2 * 3 + 1, 64))
  >>> dot_product_attention(q, k, v, relations=RelativePositions(table, table)).shape
  (2, 10, 8, 64)
  """
  inputs = gather_inputs(
    query,
    key,
    value,
    bias,
    mask,
    relations=relations,
    scale=scale,
    logits_soft_cap=logits_soft_cap,
    sinks=sinks,
    weights=weights,
    divisor=divisor,
    is_causal=is_causal,
    query_positions=query_positions,
    key_positions=key_positions,
    query_offset=query_offset,
    query_seq_lengths=query_seq_lengths,
    key_value_seq_lengths=key_value_seq_lengths,
    local_window_size=local_window_size,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
    dropout_rate=dropout_rate,
    dropout_key=dropout_key,
    return_residual=return_residual,
  )
  result = ("BTNH", "BTN") if return_residual else "BTNH"
  try:
    output = _compute(_attend, inputs, implementation, result=result)
  except TypeError as error:
    if "custom_vjp" not in str(error):
      raise
    # jax.jvp outside of jax.jit raises this.
    raise NotImplementedError(FIRST_DERIVATIVES_ONLY) from error
  batch = jnp.shape(query)[:-3]
  return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), output)


def attention_weights(
  query: ArrayLike,
  key: ArrayLike,
  bias: ArrayLike | None = None,
  mask: ArrayLike | None = None,
  **options: Unpack[AttentionOptions],
) -> Array:
  """Computes the weights p_ij of `dot_product_attention`, before dropout.

  Takes the same arguments, except `value`, `implementation` and `return_residual`.

  Returns:
    `[B, N, T, S]` (or `[N, T, S]`), float32, or float64 for float64 inputs. Each
    query's weights sum to 1, to less than 1 with `sinks`, or to 0 if the query is fully
    masked. With "silu" the sum is unconstrained.

  >>> q = k = jnp.ones((2, 4, 1, 8))
  >>> attention_weights(q, k, is_causal=True)[0, 0]
  Array([[1.        , 0.        , 0.        , 0.        ],
         [0.5       , 0.5       , 0.        , 0.        ],
         [0.33333334, 0.33333334, 0.33333334, 0.        ],
         [0.25      , 0.25      , 0.25      , 0.25      ]], dtype=float32)
  """
  inputs = gather_inputs(query, key, None, bias, mask, **options)
  weights = _compute(_weights, inputs, result="BNTS")
  return weights.reshape(*jnp.shape(query)[:-3], *weights.shape[1:])


def merge(
  outputs: Sequence[ArrayLike], residuals: Sequence[ArrayLike]
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
  """Merges attention to parts of the keys into attention to all of them.

  Takes the results of several calls of `dot_product_attention` with `return_residual`.
  All calls have the same queries, and each has a different part of the keys. Returns
  the output and the residual for all keys. Gradients are exact, too.

  Give sinks to one call, in which every query attends to a key: the residual of a query
  without keys is -inf, and its sink is lost.

  >>> q, k = jnp.ones((2, 1, 8)), jnp.linspace(0.0, 1.0, 4 * 8).reshape(4, 1, 8)
  >>> first, last = k[:1], k[1:]
  >>> parts = [dot_product_attention(q, first, first, return_residual=True)]
  >>> parts += [dot_product_attention(q, last, last, return_residual=True)]
  >>> output, residual = merge(*zip(*parts))
  >>> bool(jnp.allclose(output, dot_product_attention(q, k, k), atol=1e-6))
  True
  """
  output_of_part = jnp.stack(outputs)
  residual_of_part = jnp.stack(residuals)
  if output_of_part.shape[:-1] != residual_of_part.shape:
    raise ValueError(
      f"outputs have shape {output_of_part.shape} and residuals "
      f"{residual_of_part.shape}; want [X, *B, T, N, V] and [X, *B, T, N] for X parts"
    )
  is_masked = jnp.isneginf(residual_of_part).all(0, keepdims=True)
  finite = jnp.where(is_masked, 0, residual_of_part)
  total = jax.nn.logsumexp(finite, axis=0, keepdims=True)
  shares = jnp.exp(residual_of_part - total)
  merged = jnp.sum(shares[..., None] * output_of_part.astype(shares.dtype), axis=0)
  residual = jnp.where(is_masked, -jnp.inf, total)[0]
  return merged.astype(output_of_part.dtype), residual


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
  """Wraps a number or a name; calls with equal values share a compiled program."""

  value: Any


def _compute(
  function: Callable,
  inputs: Inputs,
  implementation: str | None = None,
  *,
  result: str | tuple[str, ...],
) -> Any:
  """Computes `function(inputs, implementation)`, compiled unless within `jax.jit`.

  JAX compiles it once for the shapes and for the values that are not arrays. `result`
  names the axes of the result by letters, such as "BNTS". For several results it is a
  tuple of such names.
  """
  # In jax.jit new arrays are tracers. Under jax.grad and jax.vmap they are concrete.
  is_in_jit = isinstance(jnp.zeros(()), Tracer)
  if is_in_jit:
    return _run(inputs, function, implementation, result)
  inputs = _with_traced_numbers(inputs, implementation)
  inputs = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else _Static(x), inputs)
  return _run_compiled(inputs, function, implementation, result)


def _run(
  inputs: Inputs,
  function: Callable,
  implementation: str | None,
  result: str | tuple[str, ...],
) -> Any:
  def is_static(x):
    return isinstance(x, _Static)

  inputs = jax.tree.map(
    lambda x: x.value if is_static(x) else x, inputs, is_leaf=is_static
  )
  arguments = inputs, implementation
  return with_automatic_axes(function, inputs.query, *arguments, result=result)


_run_compiled = jax.jit(_run, static_argnums=(1, 2, 3))


def _with_traced_numbers(inputs: Inputs, implementation: str | None) -> Inputs:
  """Converts numbers to arrays, so that changing them does not recompile."""
  position_dtype = inputs.query_positions.dtype
  programs = tuple(relation.as_program(position_dtype) for relation in inputs.relations)
  offset, scale = inputs.query_offset, inputs.scale
  divisor = inputs.silu_divisor
  if divisor is not None:
    divisor = jnp.asarray(divisor, accumulation_dtype(inputs.query.dtype))
  if isinstance(offset, int) and offset:
    offset = jnp.int32([offset])
  if not _may_run_kernel(implementation):
    scale = jnp.asarray(scale)
  elif not isinstance(scale, Tracer):
    scale = np.asarray(scale).item()
  return inputs._replace(
    relations=programs, query_offset=offset, scale=scale, silu_divisor=divisor
  )


def _may_run_kernel(implementation: str | None) -> bool:
  """Returns whether a call may run a kernel, which is compiled for one scale."""
  if implementation is None:
    return target_platform() != "cpu"
  known = IMPLEMENTATIONS.get(implementation)
  return known is not None and known.device is not None


def _attend(inputs: Inputs, implementation: str | None) -> Array | tuple[Array, Array]:
  """Calls the named implementation, or chooses one."""
  choice = choose(inputs, implementation)
  if not inputs.query.size or not inputs.key.size:
    return _without_pairs(inputs)
  if choice.implementation == PLAIN:
    return _plain(inputs)
  if choice.implementation == CUDNN:
    return _cudnn(inputs)
  return IMPLEMENTATIONS[choice.implementation].attention(inputs)


def _without_pairs(inputs: Inputs) -> Array | tuple[Array, Array]:
  """Returns zeros and residuals of -inf, for calls without queries or keys."""
  *queries, _ = inputs.query.shape
  dtype = inputs.value.dtype
  output = jnp.zeros((*queries, inputs.value.shape[3]), dtype)
  if not inputs.return_residual:
    return output
  return output, jnp.full(queries, -jnp.inf, accumulation_dtype(dtype))


def _weights(inputs: Inputs, _) -> Float[Array, "B N T S"]:
  if inputs.query.size and inputs.key.size:
    return reference.attention_weights(inputs, reference.projected_logits)[0]
  batch, num_queries, heads, _ = inputs.query.shape
  shape = batch, heads, num_queries, inputs.key.shape[1]
  return jnp.zeros(shape, accumulation_dtype(inputs.query.dtype))


def _plain(inputs: Inputs) -> Array:
  """Calls jax.nn, then sets the output of fully masked queries to zero.

  For these, jax.nn returns the mean of the values.
  """
  mask = inputs.pair_mask()
  bias = inputs.bias_of_each()
  if bias is not None:
    # jax.nn returns NaN for a query with -inf for all keys.
    bias = jnp.maximum(bias.astype(jnp.float32), masks.LOWEST)
  arrays = inputs.query, inputs.key, inputs.value, bias, mask
  output = jax.nn.dot_product_attention(*arrays, scale=inputs.scale)  # pyright: ignore
  if bias is not None:
    is_masked = bias <= masks.LOWEST / 2  # False for NaN
    mask = masks.combine(mask, ~is_masked)
  if mask is None:
    return output
  has_key_BTN1 = jnp.moveaxis(mask.any(-1, keepdims=True), 1, 2)
  return jnp.where(has_key_BTN1, output, 0)


def _cudnn(inputs: Inputs) -> Array:
  """Calls cuDNN through jax.nn, for causal calls without masks."""
  arrays = inputs.query, inputs.key, inputs.value
  scale = np.asarray(inputs.scale).item()  # jax.nn wants a static number
  options = dict(scale=scale, is_causal=True, implementation="cudnn")
  return jax.nn.dot_product_attention(*arrays, **options)  # pyright: ignore
