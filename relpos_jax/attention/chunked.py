"""Attention by blocks in plain XLA: an online softmax, and never a [T, S] tensor.

Two passes over the keys share one softmax. The *band* pass takes the pairs on the diagonals inside
the table: short blocks of queries, each with the window of keys that its diagonals pass, all at
once. The *far* pass takes all other pairs, a block of queries and a tile of keys at a time: plain
attention, but for one number per query right of the band (see band.py).
The backward pass visits the same pieces; only the outputs and a logsumexp are kept for it.
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

unsupported = bands.unsupported


class Plan(NamedTuple):
  """What is known of a call before it is compiled.

  Attributes:
    num_queries, num_keys: T and S.
    block, tile: queries and keys of a piece of the far pass.
    band_block: queries of a piece of the band pass; a divisor of `block`.
    first, num_diagonals: of the band; none without relations.
    with_sums: whether there is a value table.
  """

  num_queries: int
  num_keys: int
  block: int
  tile: int
  band_block: int
  first: int
  num_diagonals: int
  with_sums: bool
  is_causal: bool
  window: tuple[int, int] | None
  dropout_rate: float

  @property
  def num_padded_queries(self) -> int:
    return -(-self.num_queries // self.block) * self.block

  @property
  def window_blocks(self) -> int:
    """Blocks of `band_block` keys that make a window of the band pass."""
    return -(-(self.band_block + self.num_diagonals - 1) // self.band_block)

  @property
  def key_padding(self) -> tuple[int, int]:
    """So that a window starts with every band block, and whole tiles cover the keys."""
    left = max(0, -self.first)
    last_window = self.num_padded_queries + self.window_blocks * self.band_block
    tiles = -(-self.num_keys // self.tile) * self.tile
    return left, max(last_window, left + tiles) - left - self.num_keys


class Operands(NamedTuple):
  """What gradients are taken of: heads first, and G query heads for each of K key heads."""

  query: Float[Array, "*B K G T H"]  # scaled
  key: Float[Array, "*B K S H"]
  value: Float[Array, "*B K S H"]
  band_logits: Float[Array, "*B K G T R"] | None
  bias: Float[Array, "*B #K #G #T #S"] | None


class Hidden(NamedTuple):
  """What hides pairs, beside their positions."""

  masks: tuple[Bool[Array, "*B #K #G #T #S"], ...]
  query_segments: Int[Array, "*B 1 1 T 1"] | None
  key_segments: Int[Array, "*B 1 1 1 S"] | None


class Piece(NamedTuple):
  """Some queries and some keys that meet at once, all of a call's arrays cut to them."""

  operands: Operands
  hidden: Hidden
  rows: Int[Array, "*B T"]
  columns: Int[Array, "*B S"]


class Outputs(NamedTuple):
  """Of every query: sum_j p_ij v_j, and the sums of p_ij by row of the band and in all."""

  content: Float[Array, "*B K G T H"]
  sums: Float[Array, "*B K G T R"] | None
  row_sums: Float[Array, "*B K G T 1"]


class Softmax(NamedTuple):
  """An online softmax: the largest logit so far, and sums of exp(logit - largest)."""

  largest: Float[Array, "*B K G T 1"]
  total: Float[Array, "*B K G T 1"]
  outputs: Outputs  # not yet divided by the total


def attention(
  inputs: Inputs, block: int | None = None, tile: int = 1024
) -> Float[Array, "B T N H"]:
  """Attention in blocks of `block` queries and tiles of `tile` keys; None finds a block's size."""
  band = bands.band_of(inputs)
  plan = _plan(inputs, band, block, tile)
  seeds = inputs.dropout_seeds
  seeds = None if seeds is None else _grouped(seeds[..., None, None], inputs)
  outputs = _flash(plan, _operands(inputs, band), _hidden(inputs), seeds)
  ungrouped = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), outputs)
  output_BTNH = ungrouped.content.swapaxes(1, 2)
  if plan.with_sums:
    output_BTNH += bands.relative_values(ungrouped.sums, ungrouped.row_sums[..., 0], band)
  return output_BTNH.astype(inputs.value.dtype)


def _plan(inputs: Inputs, band: bands.Band | None, block: int | None, tile: int) -> Plan:
  batch, num_queries, heads, _ = inputs.query.shape
  num_keys = inputs.key.shape[1]
  tile = min(tile, num_keys)
  if block is None:  # a piece's logits are to stay in the cache: about 2**20 of them
    block = max(32, min(256, 2**20 // (batch * heads * tile)))
  num_diagonals = 0 if band is None else band.num_diagonals
  band_block = max(1, min(32, block, num_queries))
  block = -(-min(block, num_queries) // band_block) * band_block
  return Plan(
    num_queries=num_queries,
    num_keys=num_keys,
    block=block,
    tile=tile,
    band_block=band_block,
    first=0 if band is None else band.first,
    num_diagonals=num_diagonals,
    with_sums=band is not None and band.value is not None,
    is_causal=inputs.is_causal,
    window=inputs.window,
    dropout_rate=inputs.dropout_rate,
  )


def _operands(inputs: Inputs, band: bands.Band | None) -> Operands:
  wide = jnp.promote_types(inputs.query.dtype, jnp.float32)
  logits = None if band is None or band.key is None else bands.relative_logits(inputs, band)
  query = _grouped(inputs.query.swapaxes(1, 2).astype(wide), inputs)
  return Operands(
    query=query * jnp.asarray(inputs.scale, wide),
    key=inputs.key.swapaxes(1, 2).astype(wide),
    value=inputs.value.swapaxes(1, 2).astype(wide),
    band_logits=None if logits is None else _grouped(logits, inputs),
    bias=None if inputs.bias is None else _grouped(inputs.bias.astype(wide), inputs),
  )


def _hidden(inputs: Inputs) -> Hidden:
  masks = [inputs.mask, inputs.real_queries(), inputs.real_keys()]
  segments = inputs.query_segment_ids, inputs.key_segment_ids
  return Hidden(
    masks=tuple(_grouped(mask, inputs) for mask in masks if mask is not None),
    query_segments=None if segments[0] is None else segments[0][:, None, None, :, None],
    key_segments=None if segments[1] is None else segments[1][:, None, None, None, :],
  )


def _grouped(x: Array, inputs: Inputs) -> Array:
  """[B, N or 1, ...] to [B, K or 1, G or 1, ...]."""
  return x.reshape(x.shape[0], min(inputs.key.shape[2], x.shape[1]), -1, *x.shape[2:])


# The passes over all pieces, forward and backward.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(plan: Plan, operands: Operands, hidden: Hidden, seeds: Array | None) -> Outputs:
  return _forward(plan, operands, hidden, seeds)[0]


def _forward(plan: Plan, operands: Operands, hidden: Hidden, seeds: Array | None):
  padded = _pad_operands(operands, plan), _pad_hidden(hidden, plan)
  rows = _starts(plan, plan.block)
  attend = lambda piece, is_band: _attend(piece, plan, seeds, is_band)

  def far(_, block):
    row, softmax = block
    visit = lambda softmax, column: _merge(
      softmax, attend(_tile(row, column, *padded, plan), is_band=False)
    )
    return None, _finish(_over_tiles(visit, softmax, row, plan))

  if plan.num_diagonals:
    bands = jax.vmap(lambda piece: attend(piece, is_band=True))(_windows(*padded, plan))
    softmax = jax.tree.map(lambda x: _blocks(_joined(x), plan.block), bands)
  else:
    softmax = _empty_softmax(plan, padded[0].query)
  _, blocks = jax.lax.scan(far, None, (rows, softmax))
  joined = jax.tree.map(lambda x: _joined(x)[..., : plan.num_queries, :], blocks)
  return joined[0], (operands, hidden, seeds, *joined)


def _backward(plan: Plan, residuals, cotangents: Outputs):
  operands, hidden, seeds, outputs, logsumexp = residuals
  pairs = zip(jax.tree.leaves(outputs), jax.tree.leaves(cotangents), strict=True)
  mean = sum((x * dx).sum(-1, keepdims=True) for x, dx in pairs)  # of dp_ij, under p_ij
  queries = jax.tree.map(lambda x: _pad_queries(x, plan), (cotangents, mean, logsumexp))
  padded = _pad_operands(operands, plan), _pad_hidden(hidden, plan)
  differentiate = lambda piece, queries, is_band: _gradients(piece, *queries, plan, seeds, is_band)

  def far(gradients, block):
    row, queries = block
    visit = lambda gradients, column: _add_tile(
      gradients,
      differentiate(_tile(row, column, *padded, plan), queries, is_band=False),
      *(row, column, plan),
    )
    return _over_tiles(visit, gradients, row, plan), None

  gradients = jax.tree.map(jnp.zeros_like, padded[0])
  if plan.num_diagonals:
    blocks = jax.tree.map(lambda x: _blocks(x, plan.band_block), queries)
    pieces = _windows(*padded, plan)
    in_band = jax.vmap(lambda *args: differentiate(*args, is_band=True))(pieces, blocks)
    windows = lambda operands: _windows(operands, padded[1], plan).operands
    gradients = jax.linear_transpose(windows, padded[0])(in_band)[0]
  blocks = jax.tree.map(lambda x: _blocks(x, plan.block), queries)
  gradients, _ = jax.lax.scan(far, gradients, (_starts(plan, plan.block), blocks))
  unpad = jax.linear_transpose(lambda x: _pad_operands(x, plan), operands)
  return unpad(gradients)[0], None, None


_flash.defvjp(_forward, _backward)


def _over_tiles(visit, carry, row: Int[Array, ""], plan: Plan):
  """Folds `visit` over the first columns of the tiles that a block of queries may see."""
  num_tiles = -(-plan.num_keys // plan.tile)
  if num_tiles == 1:
    return visit(carry, jnp.int32(0))
  start, stop = jnp.int32(0), jnp.int32(plan.num_keys)
  if plan.is_causal:
    stop = jnp.minimum(stop, row + plan.block)
  if plan.window is not None:
    start = jnp.maximum(start, row - plan.window[0])
    stop = jnp.minimum(stop, row + plan.block + plan.window[1])
  tiles = start // plan.tile, -(-stop // plan.tile)
  return jax.lax.fori_loop(*tiles, lambda i, carry: visit(carry, i * plan.tile), carry)


# One piece.


def _attend(piece: Piece, plan: Plan, seeds: Array | None, is_band: bool) -> Softmax:
  logits = _logits(piece, plan, is_band)
  largest = logits.max(-1, keepdims=True)
  weights = jnp.exp(logits - largest)
  kept = _drop(weights, piece, plan, seeds)
  outputs = Outputs(
    content=jnp.einsum("...KGTS,...KSH->...KGTH", kept, piece.operands.value),
    sums=_sum_by_row(kept, piece, plan, is_band) if plan.with_sums else None,
    row_sums=kept.sum(-1, keepdims=True),
  )
  return Softmax(largest, weights.sum(-1, keepdims=True), outputs)


def _empty_softmax(plan: Plan, query: Float[Array, "B K G T H"]) -> Softmax:
  """Of each block of queries, before it has seen a key."""
  shape = (plan.num_padded_queries // plan.block, *query.shape[:3], plan.block)
  full = lambda width, x=0.0: jnp.full((*shape, width), x, query.dtype)
  sums = full(plan.num_diagonals + 1) if plan.with_sums else None
  return Softmax(full(1, _LOW), full(1), Outputs(full(query.shape[-1]), sums, full(1)))


def _merge(x: Softmax, y: Softmax) -> Softmax:
  largest = jnp.maximum(x.largest, y.largest)
  fade_x, fade_y = jnp.exp(x.largest - largest), jnp.exp(y.largest - largest)
  add = lambda x, y: x * fade_x + y * fade_y
  return Softmax(largest, *jax.tree.map(add, x[1:], y[1:]))


def _finish(softmax: Softmax) -> tuple[Outputs, Float[Array, "B K G T 1"]]:
  """Outputs and logsumexp; zero and infinity for a query that saw no key."""
  saw_a_key = softmax.largest > 0.5 * _LOW
  outputs = jax.tree.map(lambda x: jnp.where(saw_a_key, x / softmax.total, 0), softmax.outputs)
  logsumexp = softmax.largest + jnp.log(softmax.total)
  return outputs, jnp.where(saw_a_key, logsumexp, jnp.inf)


def _gradients(
  piece: Piece,
  cotangents: Outputs,
  mean: Float[Array, "*B K G T 1"],
  logsumexp: Float[Array, "*B K G T 1"],
  plan: Plan,
  seeds: Array | None,
  is_band: bool,
) -> Operands:
  query, key, value, band_logits, bias = piece.operands
  weights = jnp.exp(_logits(piece, plan, is_band) - logsumexp)
  d_weights = jnp.einsum("...KGTH,...KSH->...KGTS", cotangents.content, value)
  d_weights += cotangents.row_sums
  if cotangents.sums is not None:
    d_weights += _spread(cotangents.sums, piece, plan, is_band)
  d_logits = weights * (_drop(d_weights, piece, plan, seeds) - mean)
  kept = _drop(weights, piece, plan, seeds)
  return Operands(
    query=jnp.einsum("...KGTS,...KSH->...KGTH", d_logits, key),
    key=jnp.einsum("...KGTS,...KGTH->...KSH", d_logits, query),
    value=jnp.einsum("...KGTS,...KGTH->...KSH", kept, cotangents.content),
    band_logits=None if band_logits is None else _sum_by_row(d_logits, piece, plan, is_band),
    bias=None if bias is None else _sum_to(bias.shape, d_logits),
  )


def _logits(piece: Piece, plan: Plan, is_band: bool) -> Float[Array, "*B K G T S"]:
  """Very low for a pair that is hidden, or another pass's."""
  logits = jnp.einsum("...KGTH,...KSH->...KGTS", piece.operands.query, piece.operands.key)
  if piece.operands.band_logits is not None:
    logits += _spread(piece.operands.band_logits, piece, plan, is_band)
  if piece.operands.bias is not None:
    logits += piece.operands.bias
  return jnp.where(_visible(piece, plan, is_band), logits, _LOW)


def _spread(
  x: Float[Array, "*B T R"], piece: Piece, plan: Plan, is_band: bool
) -> Float[Array, "*B T S"]:
  """Gives every pair the number of its row of the band, 0 left of the band."""
  if is_band:
    before = [(0, 0)] * (x.ndim - 1) + [(x.shape[-2] - 1, 0)]
    return skew(jnp.pad(x[..., :-1], before), len(piece.columns))
  right_of_band = _diagonals(piece, plan) >= plan.num_diagonals
  return jnp.where(right_of_band, x[..., -1:], 0)


def _sum_by_row(
  x: Float[Array, "*B T S"], piece: Piece, plan: Plan, is_band: bool
) -> Float[Array, "*B T R"]:
  """The sums over the pairs of each row of the band: the transpose of spreading."""
  sums = jax.ShapeDtypeStruct((*x.shape[:-1], plan.num_diagonals + 1), x.dtype)
  return jax.linear_transpose(lambda sums: _spread(sums, piece, plan, is_band), sums)(x)[0]


def _diagonals(piece: Piece, plan: Plan) -> Int[Array, "T S"]:
  """The band's row of every pair, beyond the band too."""
  return piece.columns - piece.rows[:, None] - plan.first


def _visible(piece: Piece, plan: Plan, is_band: bool) -> Bool[Array, "*#B T S"]:
  diagonals, columns = _diagonals(piece, plan), piece.columns
  in_band = (diagonals >= 0) & (diagonals < plan.num_diagonals)
  visible = [(columns >= 0) & (columns < plan.num_keys), in_band if is_band else ~in_band]
  if plan.is_causal:
    visible.append(diagonals <= -plan.first)
  if plan.window is not None:
    left, right = plan.window
    visible.append((-left <= diagonals + plan.first) & (diagonals + plan.first <= right))
  visible += piece.hidden.masks
  if piece.hidden.query_segments is not None:
    visible.append(piece.hidden.query_segments == piece.hidden.key_segments)
  return functools.reduce(jnp.logical_and, visible)


def _drop(
  x: Float[Array, "*B K G T S"], piece: Piece, plan: Plan, seeds: Int[Array, "B K G 1 1"] | None
) -> Float[Array, "*B K G T S"]:
  """Zero where a weight is dropped, larger elsewhere."""
  if seeds is None:
    return x
  kept = dropout.keep(seeds, piece.rows[:, None], piece.columns, plan.dropout_rate)
  return jnp.where(kept, x / (1 - plan.dropout_rate), 0)


def _sum_to(shape: tuple[int, ...], x: Array) -> Array:
  """The transpose of broadcasting to the shape of x."""
  return x.sum([axis for axis, size in enumerate(shape) if size == 1], keepdims=True)


# Padding and cutting. An axis of size 1 of a mask or bias stands for all queries or keys.


def _tile(
  row: Int[Array, ""], column: Int[Array, ""], operands: Operands, hidden: Hidden, plan: Plan
) -> Piece:
  """A block of queries and a tile of keys, of padded arrays."""
  queries = lambda x: _cut(x, row, plan.block, -2)
  keys = lambda x, axis=-2: _cut(x, column + plan.key_padding[0], plan.tile, axis)
  pairs = lambda x: keys(queries(x), axis=-1)
  query, key, value, band_logits, bias = operands
  cut = Operands(
    queries(query),
    keys(key),
    keys(value),
    jax.tree.map(queries, band_logits),
    jax.tree.map(pairs, bias),
  )
  rows, columns = row + jnp.arange(plan.block), column + jnp.arange(plan.tile)
  return Piece(cut, jax.tree.map(pairs, hidden), rows, columns)


def _add_tile(
  gradients: Operands, of_tile: Operands, row: Int[Array, ""], column: Int[Array, ""], plan: Plan
) -> Operands:
  """Adds a tile's gradients where `_tile` had cut."""
  at = jnp.int32(row), jnp.int32(column + plan.key_padding[0])
  queries = lambda x, dx: _add(x, dx, {-2: at[0]})
  keys = lambda x, dx: _add(x, dx, {-2: at[1]})
  pairs = lambda x, dx: _add(x, dx, {-2: at[0], -1: at[1]})
  add = Operands(queries, keys, keys, queries, pairs)
  return Operands(
    *(x if x is None else f(x, dx) for f, x, dx in zip(add, gradients, of_tile, strict=True))
  )


def _windows(operands: Operands, hidden: Hidden, plan: Plan) -> Piece:
  """All blocks of queries of the band pass, stacked, each with its window of keys."""
  rows = _starts(plan, plan.band_block)[:, None] + jnp.arange(plan.band_block)
  columns = rows[:, :1] + plan.first + jnp.arange(plan.window_blocks * plan.band_block)
  queries = lambda x: _blocks(x, plan.band_block)
  keys = lambda x: _key_windows(x, plan)
  pairs = lambda x: _pair_windows(x, rows, columns + plan.key_padding[0])
  query, key, value, band_logits, bias = operands
  cut = Operands(
    queries(query),
    keys(key),
    keys(value),
    jax.tree.map(queries, band_logits),
    jax.tree.map(pairs, bias),
  )
  return Piece(cut, jax.tree.map(pairs, hidden), rows, columns)


def _starts(plan: Plan, size: int) -> Int[Array, " L"]:
  """The first query of each block of this size."""
  return jnp.arange(plan.num_padded_queries // size, dtype=jnp.int32) * size


def _blocks(x: Float[Array, "*B T H"], size: int) -> Float[Array, "L *B {size} H"]:
  """Stacks blocks of `size` queries or keys."""
  blocks = x.reshape(*x.shape[:-2], -1, size, x.shape[-1])
  return jnp.moveaxis(blocks, -3, 0)


def _joined(x: Float[Array, "L *B M H"]) -> Float[Array, "*B T H"]:
  """Undoes `_blocks`."""
  x = jnp.moveaxis(x, 0, -3)
  return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def _key_windows(x: Float[Array, "*B S H"], plan: Plan) -> Float[Array, "L *B W H"]:
  """The window of each band block: some consecutive blocks of keys, side by side."""
  num_blocks = plan.num_padded_queries // plan.band_block
  start = plan.first + plan.key_padding[0]
  stop = start + (num_blocks + plan.window_blocks - 1) * plan.band_block
  blocks = _blocks(x[..., start:stop, :], plan.band_block)
  shifted = [blocks[i : i + num_blocks] for i in range(plan.window_blocks)]
  return jnp.concatenate(shifted, axis=-2)


def _pair_windows(
  x: Shaped[Array, "*B #T #S"], rows: Int[Array, "L M"], columns: Int[Array, "L W"]
) -> Shaped[Array, "L *B #M #W"]:
  """The pairs of every band block and its window."""
  rows = rows[:, : x.shape[-2], None]
  columns = columns[:, None, : x.shape[-1]]
  if x.shape[-2] == 1:
    rows = jnp.zeros_like(rows)
  if x.shape[-1] == 1:
    columns = jnp.zeros_like(columns)
  return jnp.moveaxis(x[..., rows, columns], -3, 0)


def _pad_operands(operands: Operands, plan: Plan) -> Operands:
  query, key, value, band_logits, bias = operands
  return Operands(
    _pad_queries(query, plan),
    _pad(key, -2, *plan.key_padding),
    _pad(value, -2, *plan.key_padding),
    jax.tree.map(lambda x: _pad_queries(x, plan), band_logits),
    jax.tree.map(lambda x: _pad_pairs(x, plan), bias),
  )


def _pad_hidden(hidden: Hidden, plan: Plan) -> Hidden:
  return jax.tree.map(lambda x: _pad_pairs(x, plan), hidden)


def _pad_queries(x: Array, plan: Plan) -> Array:
  return _pad(x, -2, 0, plan.num_padded_queries - plan.num_queries)


def _pad_pairs(x: Array, plan: Plan) -> Array:
  x = x if x.shape[-2] == 1 else _pad_queries(x, plan)
  return x if x.shape[-1] == 1 else _pad(x, -1, *plan.key_padding)


def _pad(x: Array, axis: int, before: int, after: int) -> Array:
  widths = [(0, 0)] * x.ndim
  widths[axis] = before, after
  return jnp.pad(x, widths)


def _cut(x: Array, start: Int[Array, ""], size: int, axis: int) -> Array:
  if x.shape[axis] == 1:
    return x
  return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _add(x: Array, dx: Array, starts: dict[int, Int[Array, ""]]) -> Array:
  """x with dx added from these starts on, by axis."""
  at = [jnp.int32(0)] * x.ndim
  for axis, start in starts.items():
    if x.shape[axis] != 1:
      at[axis] = start
  old = jax.lax.dynamic_slice(x, at, dx.shape)
  return jax.lax.dynamic_update_slice(x, old + dx, at)
