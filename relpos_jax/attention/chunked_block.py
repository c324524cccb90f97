"""Attention of a block of queries to all of its keys, and its gradients.

Weights are [N, S, T], queries last: sums over keys then vectorise, and no product needs a
transposed copy of them.

Letters, beside those of chunked_layout.py: D the diagonals of the band, R its rows: one more, for
the right. A value table has one more row, which is weighted by the sum of all weights of a query.
There is one table per head, or one [1, R, H] shared by all.
"""

import functools

import jax
import jax.numpy as jnp

from relpos_jax.attention import dropout, masks
from relpos_jax.attention.chunked_layout import Arrays, ChunkPlan, Keys, Piece, near_and_far
from relpos_jax.typing import Array, Bool, Float, Int, Shaped


def attend(plan: ChunkPlan, block: Arrays, keys: Keys, row: Int[Array, ""]) -> Arrays:
  """Returns a block's output, and what `differentiate` needs to compute the weights again.

  A weight is exp(logit - maximum) * inverse_total. The two are stored separately: in a logsumexp
  float32 would lose the total beside a large maximum. The sums are of exp(logit - maximum).
  Output and inverse_total are zero for a query whose keys are all masked.
  """
  pieces = near_and_far(plan, keys, row)
  terms = _project(block, "key_table", "query")
  logits = [_logits(plan, block, piece, terms) for piece in pieces]
  maximum = functools.reduce(jnp.maximum, (x.max(1) for x in logits), masks.LOWEST)
  weights = [jnp.exp(x - maximum[:, None]) for x in logits]
  total = sum(x.sum(1) for x in weights)
  has_visible_key = maximum > 0.5 * masks.LOWEST
  inverse_total = jnp.where(has_visible_key, 1 / jnp.where(has_visible_key, total, 1), 0)
  kept = [_drop(plan, block, *pair) for pair in zip(pieces, weights, strict=True)]
  row_sums = sum(x.sum(1) for x in kept) if "seeds" in block else total
  sums_over_keys = [
    _sum_over_keys(piece.value, x, keys.width) for piece, x in zip(pieces, kept, strict=True)
  ]
  output = sum(x for x, _ in sums_over_keys)
  outputs = dict(maximum=maximum, inverse_total=inverse_total)
  if "value_table" in block:
    sums = sum(
      _sum_by_row(plan, piece, x, right)
      for piece, x, (_, right) in zip(pieces, kept, sums_over_keys, strict=True)
    )
    sums = jnp.concatenate([sums, row_sums[:, None]], axis=1)
    output += jnp.einsum("NRT,NRH->NTH", sums, block["value_table"])
    outputs |= dict(right_sums=sums[:, -2], row_sums=sums[:, -1])
  return outputs | dict(output=output * inverse_total[..., None])


def differentiate(
  plan: ChunkPlan, block: Arrays, keys: Keys, row: Int[Array, ""], of_keys: Arrays
) -> tuple[Arrays, Arrays]:
  """Returns the gradients of a block's own arrays, and adds those of its keys to `of_keys`.

  The cotangents `d_output` and `delta` are already divided by the total, so weights need not be.
  """
  of_block = {}
  for piece in near_and_far(plan, keys, row):
    of_own, of_piece = _differentiate_piece(plan, block, piece, keys.width)
    of_block = {name: x + of_block.get(name, 0) for name, x in of_own.items()}
    of_keys = {name: _add_at(x, piece.start, of_piece[name]) for name, x in of_keys.items()}
  if "key_table" in block:
    d_terms = of_block.pop("d_terms")
    of_block["d_query"] += jnp.einsum("NRT,NRH->NTH", d_terms, block["key_table"])
    of_block["d_key_table"] = jnp.einsum("NRT,NTH->NRH", d_terms, block["query"])
  if "value_table" in block:
    of_all = (block[name][:, None] for name in ("right_sums", "row_sums"))
    sums = jnp.concatenate([of_block.pop("diagonal_sums"), *of_all], axis=1)
    of_block["d_value_table"] = jnp.einsum("NRT,NTH->NRH", sums, block["d_output"])
  return of_block, of_keys


def _differentiate_piece(
  plan: ChunkPlan, block: Arrays, piece: Piece, width: int
) -> tuple[Arrays, Arrays]:
  """Returns a piece's terms of the gradients of the block's own arrays, and of its keys.

  In place of the tables' gradients it returns "d_terms", by row, and the weights' "diagonal_sums".
  """
  terms, d_sums = _project(block, "key_table", "query"), _project(block, "value_table", "d_output")
  weights = jnp.exp(_logits(plan, block, piece, terms) - block["maximum"][:, None])
  kept = _drop(plan, block, piece, weights)
  d_weights = _drop(plan, block, piece, _d_kept(plan, block, piece, d_sums))
  d_logits = weights * (d_weights - block["delta"][:, None])
  d_query, right = _sum_over_keys(piece.key, d_logits, width)
  of_own = dict(d_query=d_query)
  if terms is not None:
    of_own["d_terms"] = _sum_by_row(plan, piece, d_logits, right)
  if d_sums is not None:
    of_own["diagonal_sums"] = _sum_by_diagonal(plan, piece, kept)
  if "bias" in block:
    of_own["d_bias"] = _d_bias(block["bias"], piece, d_logits)
  return of_own, dict(
    d_key=jnp.einsum("NST,NTH->NSH", d_logits, block["query"]),
    d_value=jnp.einsum("NST,NTH->NSH", kept, block["d_output"]),
  )


def _d_kept(
  plan: ChunkPlan, block: Arrays, piece: Piece, d_sums: Float[Array, "N R T"] | None
) -> Float[Array, "N S T"]:
  """Computes the gradients of the weights after dropout."""
  if d_sums is None:
    return _scores(piece.value, block["d_output"])
  d_kept = _scores(piece.value, block["d_output"], d_sums[:, -2])
  return _add_by_row(plan, piece, d_kept, d_sums[:, :-1]) + d_sums[:, -1:]


def _d_bias(
  bias: Float[Array, "#N #T #P"], piece: Piece, d_logits: Float[Array, "N S T"]
) -> Float[Array, "#N #T #P"]:
  pairs = lambda bias: jnp.broadcast_to(_slice_keys(bias, piece), d_logits.shape)
  return jax.linear_transpose(pairs, bias)(d_logits)[0]


def _project(block: Arrays, table: str, queries: str) -> Float[Array, "N R T"] | None:
  """Computes the products of a table's rows and the block's queries; None without that table."""
  if table not in block:
    return None
  return jnp.einsum("NRH,NTH->NRT", block[table], block[queries])


# Terms and sums by row of the band.


def _scores(
  keys: Float[Array, "N S W"],
  queries: Float[Array, "N T H"],
  right: Float[Array, "N T"] | float = 0.0,
) -> Float[Array, "N S T"]:
  """Computes k_j . q_i, plus `right` for keys of the first of two copies."""
  if keys.shape[2] > queries.shape[2]:
    right = jnp.broadcast_to(jnp.asarray(right, queries.dtype), queries.shape[:2])
    queries = jnp.concatenate([queries, right[..., None]], axis=-1)
  return jnp.einsum("NSW,NTW->NST", keys, queries)


def _sum_over_keys(
  keys: Float[Array, "N S W"], weights: Float[Array, "N S T"], width: int
) -> tuple[Float[Array, "N T H"], Float[Array, "N T"]]:
  """Computes sum_j w_ij k_j, and the sum of the w_ij over the first of two copies."""
  sums_NWT = jnp.einsum("NSW,NST->NWT", keys, weights)
  return sums_NWT[:, :width].swapaxes(1, 2), sums_NWT[:, width:].sum(1)


def _add_by_row(
  plan: ChunkPlan, piece: Piece, x: Float[Array, "N S T"], rows: Float[Array, "N R T"]
) -> Float[Array, "N S T"]:
  """Adds to each near pair the number of its row of the band."""
  if not piece.is_near:
    return x
  # Only the diagonals are looked up: on a CPU a look-up costs as much as ten sums.
  indices, shape = _diagonal_indices(plan, piece, x.shape), x.shape
  x = x.reshape(-1).at[indices].add(rows[:, :-1], mode="drop").reshape(shape)
  return x + jnp.where(_on_the_right(plan, piece), rows[:, -1:], 0)


def _sum_by_row(
  plan: ChunkPlan, piece: Piece, x: Float[Array, "N S T"], right: Float[Array, "N T"]
) -> Float[Array, "N R T"]:
  """Returns the sums of x over the keys of each row of the band, `right` those over far keys."""
  if piece.is_near:
    right = jnp.where(_on_the_right(plan, piece), x, 0).sum(1)
  return jnp.concatenate([_sum_by_diagonal(plan, piece, x), right[:, None]], axis=1)


def _sum_by_diagonal(
  plan: ChunkPlan, piece: Piece, x: Float[Array, "N S T"]
) -> Float[Array, "N D T"]:
  if not piece.is_near:
    return jnp.zeros((len(x), plan.num_diagonals, plan.block), x.dtype)
  return x.reshape(-1).at[_diagonal_indices(plan, piece, x.shape)].get(mode="fill", fill_value=0)


def _diagonal_indices(plan: ChunkPlan, piece: Piece, shape: tuple[int, ...]) -> Int[Array, "N D T"]:
  """Returns the flat index in [N, S, T] of each diagonal's key, out of bounds if there is none."""
  heads, size, block = shape
  columns = piece.rows[None] + plan.first + jnp.arange(plan.num_diagonals)[:, None]
  keys = (columns - piece.columns[0]) % piece.num_keys
  in_piece = (columns >= 0) & (columns < piece.num_keys) & (keys < size)
  # Heads are part of the index: a look-up batched over them is slower on a CPU.
  head_N11, query_11T = jnp.ogrid[:heads, :1, :block][::2]
  indices_NDT = (size * head_N11 + keys[None]) * block + query_11T
  return jnp.where(in_piece[None], indices_NDT, heads * size * block)


def _on_the_right(plan: ChunkPlan, piece: Piece) -> Bool[Array, "S T"]:
  return piece.distances >= plan.first + plan.num_diagonals


# Logits, masks and dropout.


def _logits(
  plan: ChunkPlan, block: Arrays, piece: Piece, terms: Float[Array, "N R T"] | None
) -> Float[Array, "N S T"]:
  """Computes logits with the relative terms by row of the band; very low ones for hidden pairs."""
  right = 0.0 if terms is None else terms[:, -1]
  # In causal attention LOWEST on the right hides far keys; `_visible` hides near ones.
  logits = _scores(piece.key, block["query"], masks.LOWEST if plan.is_causal else right)
  if terms is not None:
    logits = _add_by_row(plan, piece, logits, terms)
  if "bias" in block:
    logits += _slice_keys(block["bias"], piece)
  visible = _visible(plan, block, piece)
  return logits if visible is None else jnp.where(visible, logits, masks.LOWEST)


def _visible(plan: ChunkPlan, block: Arrays, piece: Piece) -> Bool[Array, "... #S #T"] | None:
  """Returns the mask of a piece, None if all are visible; not of causal far keys on the right."""
  names = "mask", "real_queries", "real_keys"
  visible = [_slice_keys(block[name], piece) for name in names if name in block]
  if "query_segments" in block:
    visible.append(block["key_segments"][piece.columns, None] == block["query_segments"][None])
  if plan.is_causal and piece.is_near:
    visible.append(piece.distances <= 0)
  if plan.window is not None:
    left, right = plan.window
    visible += [piece.distances >= -left, piece.distances <= right]
  return functools.reduce(jnp.logical_and, visible) if visible else None


def _slice_keys(x: Shaped[Array, "#N #T #P"], piece: Piece) -> Shaped[Array, "#N #S #T"]:
  """Returns the piece's slice of an array over all pairs, queries last."""
  x_NPT = x.swapaxes(1, 2)
  return x_NPT if x_NPT.shape[1] == 1 else x_NPT[:, piece.columns]


def _drop(
  plan: ChunkPlan, block: Arrays, piece: Piece, x: Float[Array, "N S T"]
) -> Float[Array, "N S T"]:
  """Applies dropout: zero where a weight is dropped, elsewhere divided by 1 - rate."""
  if "seeds" not in block:
    return x
  seeds = block["seeds"][:, None, None]
  rows, columns = piece.rows[None, None], piece.columns[None, :, None]
  kept = dropout.keep(seeds, rows, columns, plan.dropout_rate)
  return jnp.where(kept, x / (1 - plan.dropout_rate), 0)


def _add_at(
  x: Float[Array, "N P H"], start: Int[Array, ""], dx: Float[Array, "N S H"]
) -> Float[Array, "N P H"]:
  old = jax.lax.dynamic_slice_in_dim(x, start, dx.shape[1], axis=1)
  return jax.lax.dynamic_update_slice_in_dim(x, old + dx, start, axis=1)
