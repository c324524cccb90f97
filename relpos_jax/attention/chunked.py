"""Attention by blocks in plain XLA: an online softmax, and never a [T, S] tensor.

Two passes over the keys share one softmax. The *band* pass takes the pairs on the diagonals inside
the table: short blocks of queries, each with the window of keys that its diagonals pass, all at
once. The *far* pass takes all other pairs, a block of queries and a tile of keys at a time: plain
attention, but for one number per query right of the band (see band.py). The backward pass takes
the far pairs by blocks of keys and tiles of queries, so that only the query's gradient is added up.

Queries come last in every array: weights are [B, K, S, G, T], with G query heads for each of K key
heads. Then no product needs a transposed copy of a piece's weights, and sums over keys vectorise.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.attention import band as bands
from relpos_jax.attention import dropout
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.skew import skew
from relpos_jax.typing import Array, Bool, Float, Int, Shaped

_LOW = 0.7 * float(jnp.finfo(jnp.float32).min)
_BAND_BLOCK = 32

unsupported = bands.unsupported


class Plan(NamedTuple):
  """What is known of a call before it is compiled.

  Attributes:
    block, tile: the sides of a piece of the far pass.
    first, num_diagonals: of the band; none without relations.
    with_sums: whether there is a value table.
  """

  num_queries: int
  num_keys: int
  block: int
  tile: int
  first: int
  num_diagonals: int
  with_sums: bool
  is_causal: bool
  window: tuple[int, int] | None
  dropout_rate: float


class Operands(NamedTuple):
  """What gradients are taken of."""

  query: Float[Array, "*B K H G T"]  # scaled
  key: Float[Array, "*B K S H"]
  value: Float[Array, "*B K S H"]
  band_logits: Float[Array, "*B K R G T"] | None
  bias: Float[Array, "*B #K #S #G #T"] | None


class Hidden(NamedTuple):
  """What hides and drops pairs, beside their positions."""

  masks: tuple[Bool[Array, "*B #K #S #G #T"], ...]
  query_segments: Int[Array, "*B 1 1 1 T"] | None
  key_segments: Int[Array, "*B 1 S 1 1"] | None
  seeds: Int[Array, "B K 1 G 1"] | None


class Piece(NamedTuple):
  """Some queries and some keys that meet at once: the arrays cut to them, and their places."""

  operands: Operands
  hidden: Hidden
  rows: Int[Array, " T"]
  columns: Int[Array, "S 1 1"]
  in_band: bool


class Outputs(NamedTuple):
  """Of every query: sum_j p_ij v_j, and the sums of p_ij by row of the band and in all."""

  content: Float[Array, "*B K H G T"]
  sums: Float[Array, "*B K R G T"] | None
  row_sums: Float[Array, "*B K 1 G T"]


class Softmax(NamedTuple):
  """An online softmax: the largest logit so far, and sums of exp(logit - largest)."""

  largest: Float[Array, "*B K 1 G T"]
  total: Float[Array, "*B K 1 G T"]
  outputs: Outputs  # not yet divided by the total


class Queries(NamedTuple):
  """What the backward pass knows of every query: the cotangents and two numbers."""

  cotangents: Outputs
  mean: Float[Array, "*B K 1 G T"]  # of dp_ij, under p_ij
  logsumexp: Float[Array, "*B K 1 G T"]


def attention(
  inputs: Inputs, block: int | None = None, tile: int | None = None
) -> Float[Array, "B T N H"]:
  """Attention in pieces of `block` by `tile`; None finds their sizes."""
  band = bands.band_of(inputs)
  outputs = _flash(_plan(inputs, band, block, tile), _operands(inputs, band), _hidden(inputs))
  output_BTNH = _tokens_first(outputs.content)
  if band is not None and band.value is not None:
    sums_BNTR, row_sums_BTN1 = _tokens_first(outputs.sums), _tokens_first(outputs.row_sums)
    sums_BNTR, row_sums_BNT = sums_BNTR.swapaxes(1, 2), row_sums_BTN1[..., 0].swapaxes(1, 2)
    output_BTNH += bands.relative_values(sums_BNTR, row_sums_BNT, band)
  return output_BTNH.astype(inputs.value.dtype)


def _plan(inputs: Inputs, band: bands.Band | None, block: int | None, tile: int | None) -> Plan:
  batch, num_queries, heads, _ = inputs.query.shape
  num_keys = inputs.key.shape[1]
  if tile is None:  # smaller where causality lets a block pass over the later tiles
    tile = max(128, min(512, num_keys // 4)) if inputs.is_causal else 512
  if block is None:  # a piece's logits are to stay in the cache: about 2**22 of them
    block = max(32, min(128, 2**22 // (batch * heads * min(tile, num_keys))))
  return Plan(
    num_queries=num_queries,
    num_keys=num_keys,
    block=block,
    tile=tile,
    first=0 if band is None else band.first,
    num_diagonals=0 if band is None else band.num_diagonals,
    with_sums=band is not None and band.value is not None,
    is_causal=inputs.is_causal,
    window=inputs.window,
    dropout_rate=inputs.dropout_rate,
  )


def _operands(inputs: Inputs, band: bands.Band | None) -> Operands:
  wide = jnp.promote_types(inputs.query.dtype, jnp.float32)
  # Widened before anything else, so that its gradients are added up wide and rounded once.
  inputs = inputs._replace(query=inputs.query.astype(wide))
  query_BNTH = inputs.query.swapaxes(1, 2) * jnp.asarray(inputs.scale, wide)
  has_keys = band is not None and band.key is not None
  return Operands(
    query=_queries_last(query_BNTH, inputs),
    key=inputs.key.swapaxes(1, 2).astype(wide),
    value=inputs.value.swapaxes(1, 2).astype(wide),
    band_logits=_queries_last(bands.relative_logits(inputs, band), inputs) if has_keys else None,
    bias=None if inputs.bias is None else _queries_last(inputs.bias.astype(wide), inputs),
  )


def _hidden(inputs: Inputs) -> Hidden:
  turn = lambda x: None if x is None else _queries_last(x, inputs)
  of_query, of_key = inputs.query_segment_ids, inputs.key_segment_ids
  masks = inputs.mask, inputs.real_queries(), inputs.real_keys()
  return Hidden(
    masks=tuple(turn(mask) for mask in masks if mask is not None),
    query_segments=turn(None if of_query is None else of_query[:, None, :, None]),
    key_segments=turn(None if of_key is None else of_key[:, None, None, :]),
    seeds=turn(None if inputs.dropout_seeds is None else inputs.dropout_seeds[..., None, None]),
  )


def _queries_last(x: Shaped[Array, "B #N #T S"], inputs: Inputs) -> Shaped[Array, "B #K S #G #T"]:
  num_key_heads = min(inputs.key.shape[2], x.shape[1])
  x_BKGTS = x.reshape(x.shape[0], num_key_heads, -1, *x.shape[2:])
  return jnp.moveaxis(x_BKGTS, -1, 2)


def _tokens_first(x: Float[Array, "B K H G T"]) -> Float[Array, "B T N H"]:
  x_BTKGH = x.transpose(0, 4, 1, 3, 2)
  return x_BTKGH.reshape(*x_BTKGH.shape[:2], -1, x.shape[2])


# The two passes, forward and backward.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(plan: Plan, operands: Operands, hidden: Hidden) -> Outputs:
  return _forward(plan, operands, hidden)[0]


def _forward(plan: Plan, operands: Operands, hidden: Hidden):
  if plan.num_diagonals:
    softmax = _band_softmax(plan, operands, hidden)
  else:
    softmax = _empty_softmax(plan, operands)
  outputs, logsumexp = _far_softmax(plan, operands, hidden, softmax)
  return outputs, (operands, hidden, outputs, logsumexp)


def _backward(plan: Plan, residuals, cotangents: Outputs):
  operands, hidden, outputs, logsumexp = residuals
  pairs = zip(jax.tree.leaves(outputs), jax.tree.leaves(cotangents), strict=True)
  mean = sum((x * dx).sum(2, keepdims=True) for x, dx in pairs)
  queries = Queries(cotangents, mean, logsumexp)
  gradients = _far_gradients(plan, operands, hidden, queries)
  if plan.num_diagonals:
    of_band = _band_gradients(plan, operands, hidden, queries)
    gradients = jax.tree.map(jnp.add, gradients, of_band)
  return gradients, None


_flash.defvjp(_forward, _backward)


def _empty_softmax(plan: Plan, operands: Operands) -> Softmax:
  """Before any key."""
  batch, num_key_heads, width, *queries = operands.query.shape
  full = lambda width, x=0.0: jnp.full(
    (batch, num_key_heads, width, *queries), x, operands.query.dtype
  )
  sums = full(plan.num_diagonals + 1) if plan.with_sums else None
  return Softmax(full(1, _LOW), full(1), Outputs(full(width), sums, full(1)))


def _band_softmax(plan: Plan, operands: Operands, hidden: Hidden) -> Softmax:
  """Of every query over its diagonals."""
  attend = lambda *window: _attend(Piece(*window, in_band=True), plan)
  blocks = jax.vmap(attend)(*_windows(plan, operands, hidden))
  return jax.tree.map(lambda x: _join(x, plan), blocks)


def _band_gradients(plan: Plan, operands: Operands, hidden: Hidden, queries: Queries) -> Operands:
  differentiate = lambda queries, *window: _gradients(Piece(*window, in_band=True), queries, plan)
  windows = lambda operands: _windows(plan, operands, hidden)[0]
  blocks = jax.tree.map(lambda x: _split(x, _band_block(plan)), queries)
  gradients = jax.vmap(differentiate)(blocks, *_windows(plan, operands, hidden))
  return jax.linear_transpose(windows, operands)(gradients)[0]


def _far_softmax(plan: Plan, operands: Operands, hidden: Hidden, softmax: Softmax):
  """Goes on with all other keys; outputs and logsumexp."""
  block, tile = min(plan.block, plan.num_queries), min(plan.tile, plan.num_keys)
  call = _pad(operands, hidden, block, tile)

  def of_block(_, xs):
    row, softmax = xs
    visit = lambda column, softmax: _merge(
      softmax, _attend(_cut(*call, row, column, block, tile), plan)
    )
    start, stop = 0, row + block if plan.is_causal else plan.num_keys
    if plan.window is not None:
      start, stop = row - plan.window[0], jnp.minimum(stop, row + block + plan.window[1])
    return None, _finish(_over_tiles(visit, softmax, start, stop, plan.num_keys, tile))

  blocks = jax.tree.map(lambda x: _split(x, block), softmax)
  rows = jnp.arange(len(blocks.total), dtype=jnp.int32) * block
  _, blocks = jax.lax.scan(of_block, None, (rows, blocks))
  return jax.tree.map(lambda x: _join(x, plan), blocks)


def _far_gradients(plan: Plan, operands: Operands, hidden: Hidden, queries: Queries) -> Operands:
  """Of all pairs outside the band."""
  block, tile = min(plan.block, plan.num_keys), min(plan.tile, plan.num_queries)
  padded, padded_hidden = _pad(operands, hidden, tile, block)
  queries = jax.tree.map(lambda x: _pad_axis(x, -1, tile), queries)

  def of_block(sums, column):
    def visit(row, carry):
      piece = _cut(padded, padded_hidden, row, column, tile, block)
      of_queries = jax.tree.map(lambda x: _slice(x, -1, row, tile), queries)
      return _add_gradients(carry, _gradients(piece, of_queries, plan), row, column)

    start, stop = column if plan.is_causal else 0, plan.num_queries
    if plan.window is not None:
      start = jnp.maximum(start, column - plan.window[1])
      stop = column + block + plan.window[0]
    carry = sums._replace(key=jnp.zeros(of_keys, dtype), value=jnp.zeros(of_keys, dtype))
    carry = _over_tiles(visit, carry, start, stop, plan.num_queries, tile)
    return carry._replace(key=None, value=None), (carry.key, carry.value)

  batch, num_key_heads, length, width = padded.key.shape
  of_keys, dtype = (batch, num_key_heads, block, width), padded.key.dtype
  sums = jax.tree.map(jnp.zeros_like, padded._replace(key=None, value=None))
  columns = jnp.arange(length // block, dtype=jnp.int32) * block
  sums, blocks = jax.lax.scan(of_block, sums, columns)
  key, value = (jnp.moveaxis(x, 0, 2).reshape(padded.key.shape) for x in blocks)
  unpad = jax.linear_transpose(lambda x: _pad(x, hidden, tile, block)[0], operands)
  return unpad(sums._replace(key=key, value=value))[0]


def _over_tiles(visit, carry, start, stop, length: int, tile: int):
  """Folds `visit` over those tiles of 0 ... length that meet start ... stop."""
  if length <= tile:
    return visit(jnp.int32(0), carry)
  first = jnp.clip(start, 0, length) // tile
  last = -(-jnp.clip(stop, 0, length) // tile)
  body = lambda i, carry: visit(jnp.int32(i * tile), carry)
  return jax.lax.fori_loop(first, last, body, carry)


# One piece.


def _attend(piece: Piece, plan: Plan) -> Softmax:
  logits = _logits(piece, plan)
  largest = logits.max(-3, keepdims=True)
  weights = jnp.exp(logits - largest)
  kept = _drop(weights, piece, plan)
  outputs = Outputs(
    content=jnp.einsum("...SH,...SGT->...HGT", piece.operands.value, kept),
    sums=_sum_by_row(kept, piece, plan) if plan.with_sums else None,
    row_sums=kept.sum(-3, keepdims=True),
  )
  return Softmax(largest, weights.sum(-3, keepdims=True), outputs)


def _merge(x: Softmax, y: Softmax) -> Softmax:
  largest = jnp.maximum(x.largest, y.largest)
  fade_x, fade_y = jnp.exp(x.largest - largest), jnp.exp(y.largest - largest)
  add = lambda x, y: x * fade_x + y * fade_y
  return Softmax(largest, *jax.tree.map(add, x[1:], y[1:]))


def _finish(softmax: Softmax) -> tuple[Outputs, Float[Array, "*B K 1 G T"]]:
  """Outputs and logsumexp; zero and infinity for a query that saw no key."""
  saw_a_key = softmax.largest > 0.5 * _LOW
  outputs = jax.tree.map(lambda x: jnp.where(saw_a_key, x / softmax.total, 0), softmax.outputs)
  logsumexp = softmax.largest + jnp.log(softmax.total)
  return outputs, jnp.where(saw_a_key, logsumexp, jnp.inf)


def _gradients(piece: Piece, queries: Queries, plan: Plan) -> Operands:
  query, key, value, band_logits, bias = piece.operands
  cotangents, mean, logsumexp = queries
  weights = jnp.exp(_logits(piece, plan) - logsumexp)
  d_weights = jnp.einsum("...SH,...HGT->...SGT", value, cotangents.content)
  d_weights += cotangents.row_sums
  if cotangents.sums is not None:
    d_weights += _spread(cotangents.sums, piece, plan)
  d_logits = weights * (_drop(d_weights, piece, plan) - mean)
  kept = _drop(weights, piece, plan)
  return Operands(
    query=jnp.einsum("...SH,...SGT->...HGT", key, d_logits),
    key=jnp.einsum("...SGT,...HGT->...SH", d_logits, query),
    value=jnp.einsum("...SGT,...HGT->...SH", kept, cotangents.content),
    band_logits=None if band_logits is None else _sum_by_row(d_logits, piece, plan),
    bias=None if bias is None else _sum_to(bias.shape, d_logits),
  )


def _logits(piece: Piece, plan: Plan) -> Float[Array, "*B K S G T"]:
  """Very low for a pair that is hidden, or the other pass's."""
  logits = jnp.einsum("...SH,...HGT->...SGT", piece.operands.key, piece.operands.query)
  if piece.operands.band_logits is not None:
    logits += _spread(piece.operands.band_logits, piece, plan)
  if piece.operands.bias is not None:
    logits += piece.operands.bias
  return jnp.where(_visible(piece, plan), logits, _LOW)


def _spread(x: Float[Array, "*B R G T"], piece: Piece, plan: Plan) -> Float[Array, "*B S G T"]:
  """Gives every pair the number of its row of the band, 0 left of the band."""
  if not piece.in_band:
    return jnp.where(_diagonals(piece, plan) >= plan.num_diagonals, x[..., -1:, :, :], 0)
  diagonals_GTR = jnp.moveaxis(x[..., :-1, :, :], -3, -1)
  before = [(0, 0)] * (x.ndim - 1) + [(x.shape[-1] - 1, 0)]
  return jnp.moveaxis(skew(jnp.pad(diagonals_GTR, before), len(piece.columns)), -1, -3)


def _sum_by_row(x: Float[Array, "*B S G T"], piece: Piece, plan: Plan) -> Float[Array, "*B R G T"]:
  """The sums over the pairs of each row of the band: the transpose of spreading."""
  shape = (*x.shape[:-3], plan.num_diagonals + 1, *x.shape[-2:])
  spread = lambda sums: _spread(sums, piece, plan)
  return jax.linear_transpose(spread, jax.ShapeDtypeStruct(shape, x.dtype))(x)[0]


def _diagonals(piece: Piece, plan: Plan) -> Int[Array, "S 1 T"]:
  """Every pair's row of the band; less than 0 left of the band."""
  return piece.columns - piece.rows - plan.first


def _visible(piece: Piece, plan: Plan) -> Bool[Array, "*#B #S #G #T"]:
  """The pairs that are not hidden, and this pass's."""
  diagonals, columns = _diagonals(piece, plan), piece.columns
  distances = diagonals + plan.first
  in_band = (diagonals >= 0) & (diagonals < plan.num_diagonals)
  visible = [in_band if piece.in_band else ~in_band, columns < plan.num_keys, columns >= 0]
  if plan.is_causal:
    visible.append(distances <= 0)
  if plan.window is not None:
    visible += [-plan.window[0] <= distances, distances <= plan.window[1]]
  visible += piece.hidden.masks
  if piece.hidden.query_segments is not None:
    visible.append(piece.hidden.query_segments == piece.hidden.key_segments)
  return functools.reduce(jnp.logical_and, visible)


def _drop(x: Float[Array, "*B K S G T"], piece: Piece, plan: Plan) -> Float[Array, "*B K S G T"]:
  """Zero where a weight is dropped, larger elsewhere."""
  if piece.hidden.seeds is None:
    return x
  kept = dropout.keep(piece.hidden.seeds, piece.rows, piece.columns, plan.dropout_rate)
  return jnp.where(kept, x / (1 - plan.dropout_rate), 0)


def _sum_to(shape: tuple[int, ...], x: Array) -> Array:
  """The transpose of broadcasting to the shape of x."""
  return x.sum([axis for axis, size in enumerate(shape) if size == 1], keepdims=True)


# Cutting and padding. An axis of size 1 of a mask or bias stands for all queries or keys.


def _cut(operands: Operands, hidden: Hidden, row, column, num_rows: int, num_columns: int) -> Piece:
  """The piece that starts at a row and a column of padded arrays."""
  queries = lambda x: _slice(x, -1, row, num_rows)
  keys = lambda x: _slice(x, -2, column, num_columns)
  pairs = lambda x: _slice(queries(x), -3, column, num_columns)
  return Piece(
    *_map_call(operands, hidden, queries, keys, pairs),
    row + jnp.arange(num_rows, dtype=jnp.int32),
    column + jnp.arange(num_columns, dtype=jnp.int32)[:, None, None],
    in_band=False,
  )


def _add_gradients(sums: Operands, of_piece: Operands, row, column) -> Operands:
  """Adds a piece's gradients to those of its queries, its block of keys and its pairs."""
  queries = lambda x, dx: _add_slice(x, dx, {-1: row})
  pairs = lambda x, dx: _add_slice(x, dx, {-1: row, -3: column})
  return Operands(
    queries(sums.query, of_piece.query),
    sums.key + of_piece.key,
    sums.value + of_piece.value,
    jax.tree.map(queries, sums.band_logits, of_piece.band_logits),
    jax.tree.map(pairs, sums.bias, of_piece.bias),
  )


def _windows(plan: Plan, operands: Operands, hidden: Hidden):
  """The band pass's pieces, stacked: blocks of queries, each with its window of keys."""
  block = _band_block(plan)
  num_blocks = -(-plan.num_queries // block)
  num_columns = _window_blocks(plan) * block
  rows = block * jnp.arange(num_blocks, dtype=jnp.int32)[:, None] + jnp.arange(block)
  columns = rows[:, :1] + plan.first + jnp.arange(num_columns)
  queries = lambda x: _split(x, block)
  keys = lambda x: _key_windows(x, plan)
  pairs = lambda x: _pair_windows(x, rows, columns)
  cut = _map_call(operands, hidden, queries, keys, pairs)
  return *cut, rows, columns[..., None, None]


def _band_block(plan: Plan) -> int:
  return min(_BAND_BLOCK, plan.num_queries)


def _window_blocks(plan: Plan) -> int:
  """Blocks of keys through which the diagonals of a block of queries pass."""
  return -(-(_band_block(plan) + plan.num_diagonals - 1) // _band_block(plan))


def _key_windows(x: Float[Array, "*B S H"], plan: Plan) -> Float[Array, "L *B W H"]:
  """The window of each band block: some consecutive blocks of keys, side by side."""
  block, window_blocks = _band_block(plan), _window_blocks(plan)
  num_blocks = -(-plan.num_queries // block)
  length = (num_blocks + window_blocks - 1) * block
  # From the first window's first key on, which may lie before or after key 0.
  after = length + plan.first - plan.num_keys
  x = jax.lax.pad(
    x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 2) + [(-plan.first, after, 0), (0, 0, 0)]
  )
  blocks = jnp.moveaxis(x.reshape(*x.shape[:-2], -1, block, x.shape[-1]), -3, 0)
  return jnp.concatenate([blocks[i : i + num_blocks] for i in range(window_blocks)], axis=-2)


def _pair_windows(
  x: Shaped[Array, "*B #S #G #T"], rows: Int[Array, "L M"], columns: Int[Array, "L W"]
) -> Shaped[Array, "L *B #W #G #M"]:
  """The pairs of every band block and its window; any pair for one outside the call."""
  within = lambda i, size: jnp.clip(i, 0, size - 1)[:, : None if size > 1 else 1]
  rows, columns = within(rows, x.shape[-1]), within(columns, x.shape[-3])
  pairs_LWMBG = x[..., columns[:, :, None], :, rows[:, None, :]]
  return jnp.moveaxis(pairs_LWMBG, (1, 2), (-3, -1))


def _split(x: Shaped[Array, "*B T"], size: int) -> Shaped[Array, "L *B M"]:
  """Stacks blocks of so many queries."""
  x = _pad_axis(x, -1, size)
  return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, size), -2, 0)


def _join(x: Shaped[Array, "L *B M"], plan: Plan) -> Shaped[Array, "*B T"]:
  """Undoes `_split`."""
  x = jnp.moveaxis(x, 0, -2)
  return x.reshape(*x.shape[:-2], -1)[..., : plan.num_queries]


def _pad(operands: Operands, hidden: Hidden, num_rows: int, num_columns: int):
  """To whole pieces."""
  queries = lambda x: _pad_axis(x, -1, num_rows)
  keys = lambda x: _pad_axis(x, -2, num_columns)
  pairs = lambda x: _pad_pairs(x, num_rows, num_columns)
  return _map_call(operands, hidden, queries, keys, pairs)


def _map_call(operands: Operands, hidden: Hidden, queries, keys, pairs):
  """Applies a function each to the arrays of queries, of keys and of pairs."""
  query, key, value, band_logits, bias = operands
  mapped = Operands(
    queries(query),
    keys(key),
    keys(value),
    jax.tree.map(queries, band_logits),
    jax.tree.map(pairs, bias),
  )
  return mapped, jax.tree.map(pairs, hidden)


def _pad_pairs(x: Array, num_rows: int, num_columns: int) -> Array:
  x = x if x.shape[-1] == 1 else _pad_axis(x, -1, num_rows)
  return x if x.shape[-3] == 1 else _pad_axis(x, -3, num_columns)


def _pad_axis(x: Array, axis: int, multiple: int) -> Array:
  widths = [(0, 0)] * x.ndim
  widths[axis] = 0, -x.shape[axis] % multiple
  return jnp.pad(x, widths)


def _slice(x: Array, axis: int, start: Int[Array, ""], size: int) -> Array:
  return x if x.shape[axis] == 1 else jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _add_slice(x: Array, dx: Array, starts: dict[int, Int[Array, ""]]) -> Array:
  """x with dx added from these starts on, by axis."""
  at = [jnp.int32(0)] * x.ndim
  for axis, start in starts.items():
    if x.shape[axis] != 1:
      at[axis] = start
  old = jax.lax.dynamic_slice(x, at, dx.shape)
  return jax.lax.dynamic_update_slice(x, old + dx, at)
