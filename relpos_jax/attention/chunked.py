"""Attention by blocks in plain XLA: an online softmax, and never a [T, S] tensor.

A block of queries meets its keys in two kinds of pieces. The *window* holds the band and moves with
the block: the only piece with lookups, a skew of [block, block + D - 1]. The *tiles* hold all other
keys: plain attention, but for one number per query right of the window (see band.py).
Forward and backward visit the same pieces; nothing but the output and a logsumexp is kept.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.attention import band as bands
from relpos_jax.attention import dropout
from relpos_jax.attention.inputs import Inputs
from relpos_jax.attention.skew import skew
from relpos_jax.typing import Array, Bool, Float, Int

_LOW = 0.7 * float(jnp.finfo(jnp.float32).min)

unsupported = bands.unsupported


class Plan(NamedTuple):
  """What is known of a call before it is compiled.

  Attributes:
    block, tile: queries a block, keys a tile.
    num_queries, num_keys: T and S.
    first, num_diagonals: of the band; without relations there are none and no window.
  """

  block: int
  tile: int
  num_queries: int
  num_keys: int
  first: int
  num_diagonals: int | None
  with_sums: bool
  is_causal: bool
  window: tuple[int, int] | None
  dropout_rate: float

  @property
  def num_blocks(self) -> int:
    return -(-self.num_queries // self.block)

  @property
  def num_tiles(self) -> int:
    return -(-self.num_keys // self.tile)

  @property
  def window_width(self) -> int:
    """Keys through which a block's diagonals pass, and one more: there is always one."""
    return 0 if self.num_diagonals is None else self.block + self.num_diagonals

  @property
  def key_padding(self) -> tuple[int, int]:
    """Room for the first window on the left, and for the last window and tile on the right."""
    last_window = (self.num_blocks - 1) * self.block + self.first + self.window_width
    end = max(last_window, self.num_tiles * self.tile)
    return max(0, -self.first), end - self.num_keys


class Operands(NamedTuple):
  """What gradients are taken of: heads first, and G query heads for each of K key heads."""

  query: Float[Array, "B K G T H"]  # scaled
  key: Float[Array, "B K S H"]
  value: Float[Array, "B K S H"]
  band_logits: Float[Array, "B K G T R"] | None
  bias: Float[Array, "#B #K #G #T #S"] | None


class Hidden(NamedTuple):
  """What hides or drops pairs, beside their positions."""

  masks: tuple[Bool[Array, "#B #K #G #T #S"], ...]
  query_segments: Int[Array, "#B 1 1 T 1"] | None
  key_segments: Int[Array, "#B 1 1 1 S"] | None
  seeds: Int[Array, "B K G 1 1"] | None


class Outputs(NamedTuple):
  """Of every query: sum_j p_ij v_j, and the sums of p_ij by row of the band and in all."""

  content: Float[Array, "B K G T H"]
  sums: Float[Array, "B K G T R"] | None
  row_sums: Float[Array, "B K G T 1"]


class Piece(NamedTuple):
  """A block of queries and some consecutive keys that it meets at once: its window, or a tile."""

  plan: Plan
  row: Int[Array, ""]
  column: Int[Array, ""]
  width: int
  is_window: bool

  @property
  def rows(self) -> Int[Array, "T 1"]:
    return self.row + jnp.arange(self.plan.block, dtype=jnp.int32)[:, None]

  @property
  def columns(self) -> Int[Array, " S"]:
    return self.column + jnp.arange(self.width, dtype=jnp.int32)

  def queries(self, x: Array, axis: int = -2) -> Array:
    """The part of an array with (padded) queries along an axis."""
    return _cut(x, self.row, self.plan.block, axis)

  def keys(self, x: Array, axis: int = -2) -> Array:
    """The part of an array with (padded) keys along an axis."""
    return _cut(x, self.column + self.plan.key_padding[0], self.width, axis)

  def pairs(self, x: Array) -> Array:
    """The part of an array with queries and keys along the last two axes."""
    return self.keys(self.queries(x), axis=-1)

  def add_queries(self, x: Array, dx: Array) -> Array:
    """Adds to the part with these queries."""
    return _add(x, dx, (-2, self.row))

  def add_keys(self, x: Array, dx: Array) -> Array:
    """Adds to the part with these keys."""
    return _add(x, dx, (-2, self.column + self.plan.key_padding[0]))

  def add_pairs(self, x: Array, dx: Array) -> Array:
    """Adds to the part with these pairs, summed where x has one entry for all."""
    one_for_all = tuple(axis for axis in range(x.ndim) if x.shape[axis] == 1)
    dx = dx.sum(one_for_all, keepdims=True)
    return _add(x, dx, (-2, self.row), (-1, self.column + self.plan.key_padding[0]))


def attention(inputs: Inputs, block: int = 128, tile: int = 4096) -> Float[Array, "B T N H"]:
  """Attention in blocks of `block` queries and tiles of at most `tile` keys."""
  band = bands.band_of(inputs)
  plan = Plan(
    block=min(block, inputs.query.shape[1]),
    tile=min(tile, inputs.key.shape[1]),
    num_queries=inputs.query.shape[1],
    num_keys=inputs.key.shape[1],
    first=0 if band is None else band.first,
    num_diagonals=None if band is None else band.num_diagonals,
    with_sums=band is not None and band.value is not None,
    is_causal=inputs.is_causal,
    window=inputs.window,
    dropout_rate=inputs.dropout_rate,
  )
  outputs = _flash(plan, _operands(inputs, band), _hidden(inputs))
  output_BTNH = _tokens_first(outputs.content)
  if band is not None and band.value is not None:
    sums, row_sums = _ungrouped(outputs.sums), _ungrouped(outputs.row_sums)[..., 0]
    output_BTNH += bands.relative_values(sums, row_sums, band)
  return output_BTNH.astype(inputs.value.dtype)


def _operands(inputs: Inputs, band: bands.Band | None) -> Operands:
  wide = jnp.promote_types(inputs.query.dtype, jnp.float32)
  group = functools.partial(_grouped, num_groups=inputs.key.shape[2])
  logits = None if band is None or band.key is None else bands.relative_logits(inputs, band)
  return Operands(
    query=group(inputs.query.swapaxes(1, 2).astype(wide)) * jnp.asarray(inputs.scale, wide),
    key=inputs.key.swapaxes(1, 2).astype(wide),
    value=inputs.value.swapaxes(1, 2).astype(wide),
    band_logits=None if logits is None else group(logits),
    bias=None if inputs.bias is None else group(inputs.bias.astype(wide)),
  )


def _hidden(inputs: Inputs) -> Hidden:
  group = functools.partial(_grouped, num_groups=inputs.key.shape[2])
  masks = [inputs.mask, inputs.real_queries(), inputs.real_keys()]
  segments = inputs.query_segment_ids, inputs.key_segment_ids
  return Hidden(
    masks=tuple(group(mask) for mask in masks if mask is not None),
    query_segments=None if segments[0] is None else segments[0][:, None, None, :, None],
    key_segments=None if segments[1] is None else segments[1][:, None, None, None, :],
    seeds=None if inputs.dropout_seeds is None else group(inputs.dropout_seeds[..., None, None]),
  )


def _grouped(x: Array, num_groups: int) -> Array:
  """[B, N or 1, ...] to [B, K or 1, G or 1, ...]."""
  num_groups = min(num_groups, x.shape[1])
  return x.reshape(x.shape[0], num_groups, -1, *x.shape[2:])


def _ungrouped(x: Array) -> Array:
  """[B, K, G, ...] to [B, N, ...]."""
  return x.reshape(x.shape[0], -1, *x.shape[3:])


def _tokens_first(x: Float[Array, "B K G T H"]) -> Float[Array, "B T N H"]:
  return _ungrouped(x).swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(plan: Plan, operands: Operands, hidden: Hidden) -> Outputs:
  return _forward(plan, operands, hidden)[0]


def _forward(plan: Plan, operands: Operands, hidden: Hidden):
  padded = _pad_operands(operands, plan), _pad_hidden(hidden, plan)

  def of_block(_, row):
    visit = lambda softmax, piece: _add_to_softmax(softmax, piece, *padded)
    return None, _finish(_visit(plan, row, visit, _empty_softmax(plan, operands)))

  _, blocks = jax.lax.scan(of_block, None, _rows(plan))
  outputs, logsumexp = jax.tree.map(lambda x: _join_blocks(x, plan), blocks)
  return outputs, (operands, hidden, outputs, logsumexp)


def _backward(plan: Plan, residuals, cotangents: Outputs):
  operands, hidden, outputs, logsumexp = residuals
  pairs = zip(jax.tree.leaves(outputs), jax.tree.leaves(cotangents), strict=True)
  mean = sum((x * dx).sum(-1, keepdims=True) for x, dx in pairs)  # of dp_ij, under p_ij
  queries = jax.tree.map(lambda x: _pad_queries(x, plan), (cotangents, mean, logsumexp))
  padded = _pad_operands(operands, plan), _pad_hidden(hidden, plan)

  def of_block(gradients, row):
    visit = lambda gradients, piece: _add_to_gradients(gradients, piece, *padded, *queries)
    return _visit(plan, row, visit, gradients), None

  gradients = jax.tree.map(jnp.zeros_like, padded[0])
  gradients, _ = jax.lax.scan(of_block, gradients, _rows(plan))
  unpad = jax.linear_transpose(lambda x: _pad_operands(x, plan), operands)
  return unpad(gradients)[0], None


_flash.defvjp(_forward, _backward)


def _rows(plan: Plan) -> Int[Array, " L"]:
  """The first query of each block."""
  return jnp.arange(plan.num_blocks, dtype=jnp.int32) * plan.block


def _visit(plan: Plan, row: Int[Array, ""], add, carry):
  """Adds the window and the tiles that a block of queries may see."""
  start, stop = 0, plan.num_keys
  if plan.num_diagonals is not None:
    window = Piece(plan, row, row + plan.first, plan.window_width, is_window=True)
    carry = add(carry, window)
    stop = window.column if plan.is_causal else stop
  elif plan.is_causal:
    stop = row + plan.block
  if plan.window is not None:
    left, right = plan.window
    start, stop = row - left, jnp.minimum(stop, row + plan.block + right)
  tile = lambda i: Piece(plan, row, i * plan.tile, plan.tile, is_window=False)
  if plan.num_tiles == 1:
    return add(carry, tile(0))
  first = jnp.clip(start, 0, plan.num_keys) // plan.tile
  last = -(-jnp.clip(stop, 0, plan.num_keys) // plan.tile)
  return jax.lax.fori_loop(first, last, lambda i, carry: add(carry, tile(i)), carry)


class Softmax(NamedTuple):
  """An online softmax: the largest logit so far, and sums of exp(logit - largest)."""

  largest: Float[Array, "B K G T 1"]
  total: Float[Array, "B K G T 1"]
  outputs: Outputs  # not yet divided by the total


def _empty_softmax(plan: Plan, operands: Operands) -> Softmax:
  shape, dtype = (*operands.query.shape[:3], plan.block), operands.query.dtype
  zeros = lambda width: jnp.zeros((*shape, width), dtype)
  sums = zeros(plan.num_diagonals + 1) if plan.with_sums else None
  outputs = Outputs(zeros(operands.query.shape[-1]), sums, zeros(1))
  return Softmax(jnp.full((*shape, 1), _LOW, dtype), zeros(1), outputs)


def _add_to_softmax(softmax: Softmax, piece: Piece, operands: Operands, hidden: Hidden) -> Softmax:
  logits = _logits(piece, operands, hidden)
  largest = jnp.maximum(softmax.largest, logits.max(-1, keepdims=True))
  fade = jnp.exp(softmax.largest - largest)
  weights = jnp.exp(logits - largest)
  total = weights.sum(-1, keepdims=True)
  kept = _drop(weights, piece, hidden)
  outputs = Outputs(
    content=jnp.einsum("BKGTS,BKSH->BKGTH", kept, piece.keys(operands.value)),
    sums=_sum_by_row(kept, piece) if piece.plan.with_sums else None,
    row_sums=kept.sum(-1, keepdims=True),
  )
  add = lambda old, new: old * fade + new
  outputs = jax.tree.map(add, softmax.outputs, outputs)
  return Softmax(largest, add(softmax.total, total), outputs)


def _finish(softmax: Softmax) -> tuple[Outputs, Float[Array, "B K G T 1"]]:
  """Outputs and logsumexp; zero and infinity for a query that saw no key."""
  saw_a_key = softmax.largest > 0.5 * _LOW
  outputs = jax.tree.map(lambda x: jnp.where(saw_a_key, x / softmax.total, 0), softmax.outputs)
  logsumexp = softmax.largest + jnp.log(softmax.total)
  return outputs, jnp.where(saw_a_key, logsumexp, jnp.inf)


def _add_to_gradients(
  gradients: Operands,
  piece: Piece,
  operands: Operands,
  hidden: Hidden,
  cotangents: Outputs,
  mean: Float[Array, "B K G T 1"],
  logsumexp: Float[Array, "B K G T 1"],
) -> Operands:
  cotangents, mean, logsumexp = jax.tree.map(piece.queries, (cotangents, mean, logsumexp))
  query, key, value = (
    piece.queries(operands.query),
    piece.keys(operands.key),
    piece.keys(operands.value),
  )
  weights = jnp.exp(_logits(piece, operands, hidden) - logsumexp)
  d_weights = jnp.einsum("BKGTH,BKSH->BKGTS", cotangents.content, value) + cotangents.row_sums
  if cotangents.sums is not None:
    d_weights += _spread(cotangents.sums, piece)
  d_logits = weights * (_drop(d_weights, piece, hidden) - mean)
  kept = _drop(weights, piece, hidden)
  by_row = lambda _: piece.add_queries(gradients.band_logits, _sum_by_row(d_logits, piece))
  return Operands(
    query=piece.add_queries(gradients.query, jnp.einsum("BKGTS,BKSH->BKGTH", d_logits, key)),
    key=piece.add_keys(gradients.key, jnp.einsum("BKGTS,BKGTH->BKSH", d_logits, query)),
    value=piece.add_keys(
      gradients.value, jnp.einsum("BKGTS,BKGTH->BKSH", kept, cotangents.content)
    ),
    band_logits=jax.tree.map(by_row, gradients.band_logits),
    bias=jax.tree.map(lambda bias: piece.add_pairs(bias, d_logits), gradients.bias),
  )


def _logits(piece: Piece, operands: Operands, hidden: Hidden) -> Float[Array, "B K G T S"]:
  """Of the piece's queries and keys, very low where hidden."""
  query, key = piece.queries(operands.query), piece.keys(operands.key)
  logits = jnp.einsum("BKGTH,BKSH->BKGTS", query, key)
  if operands.band_logits is not None:
    logits += _spread(piece.queries(operands.band_logits), piece)
  if operands.bias is not None:
    logits += piece.pairs(operands.bias)
  return jnp.where(_visible(piece, hidden), logits, _LOW)


def _spread(x: Float[Array, "*B T R"], piece: Piece) -> Float[Array, "*B T S"]:
  """Gives every pair of the piece the number of its row of the band; 0 left of the band."""
  if not piece.is_window:
    right = piece.columns >= piece.row + piece.plan.first + piece.plan.window_width
    return jnp.where(right, x[..., -1:], 0)
  end = lambda x, width: jnp.broadcast_to(x, (*x.shape[:-1], width))
  left, diagonals, right = jnp.zeros_like(x[..., :1]), x[..., :-1], x[..., -1:]
  block = piece.plan.block
  by_distance = jnp.concatenate([end(left, block - 1), diagonals, end(right, block)], axis=-1)
  return skew(by_distance, piece.width)


def _sum_by_row(x: Float[Array, "*B T S"], piece: Piece) -> Float[Array, "*B T R"]:
  """The sums of x over the pairs of each row of the band: the transpose of spreading."""
  sums = jax.ShapeDtypeStruct((*x.shape[:-1], piece.plan.num_diagonals + 1), x.dtype)
  return jax.linear_transpose(lambda sums: _spread(sums, piece), sums)(x)[0]


def _visible(piece: Piece, hidden: Hidden) -> Bool[Array, "#B #K #G #T S"]:
  plan, rows, columns = piece.plan, piece.rows, piece.columns
  visible = [(columns >= 0) & (columns < plan.num_keys)]
  if plan.num_diagonals is not None and not piece.is_window:
    window = columns - (piece.row + plan.first)
    visible.append((window < 0) | (window >= plan.window_width))
  if plan.is_causal:
    visible.append(columns <= rows)
  if plan.window is not None:
    visible.append((-plan.window[0] <= columns - rows) & (columns - rows <= plan.window[1]))
  visible += map(piece.pairs, hidden.masks)
  if hidden.query_segments is not None and hidden.key_segments is not None:
    visible.append(piece.pairs(hidden.query_segments) == piece.pairs(hidden.key_segments))
  return functools.reduce(jnp.logical_and, visible)[(None,) * (5 - max(x.ndim for x in visible))]


def _drop(x: Float[Array, "B K G T S"], piece: Piece, hidden: Hidden) -> Float[Array, "B K G T S"]:
  """Zero where a weight is dropped, larger elsewhere."""
  if hidden.seeds is None:
    return x
  rate = piece.plan.dropout_rate
  kept = dropout.keep(hidden.seeds, piece.rows, piece.columns, rate)
  return jnp.where(kept, x / (1 - rate), 0)


# Padding to whole blocks and tiles. An axis of size 1 stands for all queries or keys.


def _pad_operands(operands: Operands, plan: Plan) -> Operands:
  return Operands(
    query=_pad_queries(operands.query, plan),
    key=_pad_keys(operands.key, plan),
    value=_pad_keys(operands.value, plan),
    band_logits=jax.tree.map(lambda x: _pad_queries(x, plan), operands.band_logits),
    bias=jax.tree.map(lambda x: _pad_pairs(x, plan), operands.bias),
  )


def _pad_hidden(hidden: Hidden, plan: Plan) -> Hidden:
  *pairs, seeds = hidden
  return Hidden(*jax.tree.map(lambda x: _pad_pairs(x, plan), pairs), seeds)


def _pad_queries(x: Array, plan: Plan) -> Array:
  return _pad(x, -2, 0, plan.num_blocks * plan.block - plan.num_queries)


def _pad_keys(x: Array, plan: Plan, axis: int = -2) -> Array:
  return _pad(x, axis, *plan.key_padding)


def _pad_pairs(x: Array, plan: Plan) -> Array:
  x = x if x.shape[-2] == 1 else _pad_queries(x, plan)
  return x if x.shape[-1] == 1 else _pad_keys(x, plan, axis=-1)


def _pad(x: Array, axis: int, before: int, after: int) -> Array:
  widths = [(0, 0)] * x.ndim
  widths[axis] = before, after
  return jnp.pad(x, widths)


def _cut(x: Array, start: Int[Array, ""], size: int, axis: int) -> Array:
  if x.shape[axis] == 1:
    return x
  return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _add(x: Array, dx: Array, *starts: tuple[int, Int[Array, ""]]) -> Array:
  """x with dx added from these starts on, by axis."""
  at = [jnp.int32(0)] * x.ndim
  for axis, start in starts:
    if x.shape[axis] != 1:
      at[axis] = jnp.int32(start)
  old = jax.lax.dynamic_slice(x, at, dx.shape)
  return jax.lax.dynamic_update_slice(x, old + dx, at)


def _join_blocks(x: Float[Array, "L B K G M H"], plan: Plan) -> Float[Array, "B K G T H"]:
  x = jnp.moveaxis(x, 0, 3)
  return x.reshape(*x.shape[:3], -1, x.shape[-1])[..., : plan.num_queries, :]
