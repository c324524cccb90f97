"""The memory layout of chunked attention: slices of arrays, and the keys of a block of queries.

On the diagonals of *near* keys the relative term or the mask differs from pair to pair, and is
looked up. All keys right of the near ones are alike, and so are all keys left of them (band.py):
*far* pairs are plain attention, but for one number per query on the right, which is the logit of
the band's last row, or minus infinity in causal attention.

Every block has the same number of near and of far keys. For this the keys are stored twice in a
row: the near ones are read from the first copy, and the far ones behind them, first those on the
right and then, in the second copy, those on the left. The number on the right is one more element
of the query, which the keys of the first copy multiply by 1 and those of the second by 0.

Letters: N the heads, T the block's queries, S the keys of a piece (all keys, in `Keys.of`), P the
positions in both copies, W their width, H or H + 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from relpos_jax.typing import Array, ArrayLike, Float, Int

# A letter for each axis; a gradient "d_x" has those of "x". T and S of size 1 broadcast.
AXES = dict(
  query="BTNH",
  key="BSKH",
  value="BSKH",
  key_table="RNH",
  value_table="RNH",
  bias="BNTS",
  mask="BNTS",
  real_queries="BNTS",
  real_keys="BNTS",
  query_segments="BT",
  key_segments="BS",
  seeds="BN",
  output="BTNH",
  right_sums="BNT",
  row_sums="BNT",
  maximum="BNT",
  inverse_total="BNT",
  delta="BNT",
  # One per head, whether or not heads share a table.
  d_key_table="BNRH",
  d_value_table="BNRH",
)

Arrays = dict[str, Array]  # by the names in AXES
Region = dict[str, tuple[ArrayLike, int]]  # by axis letter: start and size; other axes are full


def read(arrays: Arrays, region: Region) -> Arrays:
  """Returns the slice of each array in a region: heads first, and without the batch axis."""

  def read_one(name, array):
    part = jax.lax.dynamic_slice(array, *_starts_and_sizes(name, array.shape, region))
    return part.transpose(_heads_first(name)).squeeze(_batch_axis(name))

  return {name: read_one(name, array) for name, array in arrays.items()}


def write(arrays: Arrays, parts: Arrays, region: Region) -> Arrays:
  """Overwrites a region of the arrays with parts that have the axes `read` returns."""

  def write_one(name, part):
    starts, _ = _starts_and_sizes(name, arrays[name].shape, region)
    part = jnp.expand_dims(part, _batch_axis(name)).transpose(np.argsort(_heads_first(name)))
    return jax.lax.dynamic_update_slice(arrays[name], part, starts)

  return arrays | {name: write_one(name, part) for name, part in parts.items()}


def add(arrays: Arrays, parts: Arrays, region: Region) -> Arrays:
  """Adds parts to a region of the arrays, summed first over query heads that share a key head."""
  old = read({name: arrays[name] for name in parts}, region)
  sum_shared = lambda part, x: part.reshape(len(x), -1, *x.shape[1:]).sum(1)
  new = {name: x + sum_shared(parts[name], x) for name, x in old.items()}
  return write(arrays, new, region)


def zeros(arrays: Arrays, region: Region) -> Arrays:
  """Returns zeros with the shapes of the arrays' slices, axes in the order of the arrays."""
  shapes = {name: _starts_and_sizes(name, x.shape, region)[1] for name, x in arrays.items()}
  return {name: jnp.zeros(shapes[name], x.dtype) for name, x in arrays.items()}


def _starts_and_sizes(
  name: str, shape: tuple[int, ...], region: Region
) -> tuple[list[Int[Array, ""]], tuple[int, ...]]:
  axes = [
    region.get(letter, (0, size)) if size > 1 else (0, size)
    for letter, size in zip(_letters(name), shape, strict=True)
  ]
  starts, sizes = zip(*axes, strict=True)
  return [jnp.int32(start) for start in starts], sizes


def _heads_first(name: str) -> list[int]:
  """Returns the permutation of axes to the batch, heads, all others."""
  letters = _letters(name)
  return sorted(range(len(letters)), key=lambda axis: letters[axis] not in "BNK")


def _batch_axis(name: str) -> tuple[int, ...]:
  return (0,) if "B" in _letters(name) else ()


def _letters(name: str) -> str:
  return AXES.get(name) or AXES[name.removeprefix("d_")]


class ChunkPlan(NamedTuple):
  """The static parameters of a call.

  Attributes:
    block: the number of queries in a block.
    first: the distance j - i of the band's first diagonal.
    num_diagonals: the number of the band's diagonals.
    has_band: whether there are relations.
    is_causal, window, dropout_rate: as in `Inputs`.
  """

  block: int
  first: int
  num_diagonals: int
  has_band: bool
  is_causal: bool
  window: tuple[int, int] | None
  dropout_rate: float

  @property
  def near(self) -> tuple[int, int]:
    """Returns the lowest and the highest distance j - i of near keys."""
    if self.window is not None:
      left, right = self.window
      return -left, 0 if self.is_causal else right
    low, high = self.first, self.first + self.num_diagonals - 1
    return low, max(high, 0) if self.is_causal else high

  def num_near(self, num_keys: int) -> int:
    """Returns the number of near keys, the same for every block."""
    low, high = self.near
    return min(max(self.block + high - low, 0), num_keys) if self.has_near else 0

  def num_computed(self, num_keys: int) -> int:
    """Returns the number of keys whose logits a block computes."""
    return num_keys if self.has_far else self.num_near(num_keys)

  @property
  def has_far(self) -> bool:
    """Returns whether keys that are not near may be visible."""
    return self.window is None

  @property
  def has_near(self) -> bool:
    """Returns whether any pairs differ from the far ones."""
    return self.has_right or not self.has_far

  @property
  def has_right(self) -> bool:
    """Returns whether far keys on the right differ from those on the left."""
    return self.has_band or self.is_causal


class Keys(NamedTuple):
  """The keys and values of some heads, stored twice if far keys on the right have their own number.

  Both copies then have one more element than H: 1 in the first copy, 0 in the second.

  Attributes:
    key, value: P is S, or 2 S where there are two copies.
    num_keys: S.
    num_near: the number of near keys, the same for every block.
    width: H.
  """

  key: Float[Array, "N P W"]
  value: Float[Array, "N P W"]
  num_keys: int
  num_near: int
  width: int

  @classmethod
  def of(cls, plan: ChunkPlan, key: Float[Array, "N S H"], value: Float[Array, "N S H"]) -> "Keys":
    """Lays out keys and values as the plan's blocks need them."""
    _, num_keys, width = key.shape
    num_near = plan.num_near(num_keys)
    if plan.has_right and plan.has_far and num_near < num_keys:
      key, value = _store_twice(key), _store_twice(value)
    return cls(key, value, num_keys, num_near, width)

  @property
  def has_two_copies(self) -> bool:
    return self.key.shape[1] > self.num_keys

  def zero_gradients(self) -> Arrays:
    """Returns zeros to which blocks add the gradients of both copies."""
    zeros = jnp.zeros((*self.key.shape[:2], self.width), self.key.dtype)
    return dict(d_key=zeros, d_value=zeros)

  def sum_copies(self, grads: Arrays) -> Arrays:
    """Returns the gradients of S keys from those of both copies."""
    if not self.has_two_copies:
      return grads
    return {name: x[:, : self.num_keys] + x[:, self.num_keys :] for name, x in grads.items()}


class Piece(NamedTuple):
  """The near or the far keys of a block of queries.

  Attributes:
    start: the first key's position in the two copies.
    key, value: W is H if they are near, else as in the copies.
    rows, columns: the numbers of the queries and of the keys in the sequence.
    num_keys: of the sequence.
  """

  is_near: bool
  start: Int[Array, ""]
  key: Float[Array, "N S W"]
  value: Float[Array, "N S W"]
  rows: Int[Array, " T"]
  columns: Int[Array, " S"]
  num_keys: int

  @property
  def distances(self) -> Int[Array, "S T"]:
    return self.columns[:, None] - self.rows[None]


def _store_twice(x: Float[Array, "N S H"]) -> Float[Array, "N P W"]:
  """Returns two copies in a row, with a 1 appended in the first and a 0 in the second."""
  heads, size, width = x.shape
  # Written slice by slice: on a CPU a concatenation takes four times as long.
  both = jnp.zeros((heads, 2 * size, width + 1), x.dtype).at[:, :size, :width].set(x)
  both = both.at[:, size:, :width].set(x)
  return both.at[:, :size, width:].set(1)


def near_and_far(plan: ChunkPlan, keys: Keys, row: Int[Array, ""]) -> list[Piece]:
  """Returns the non-empty pieces of the block that begins at a row, near keys first."""
  # With one copy, either all keys are far, or those that are not near are hidden.
  num_far = 0 if keys.num_near and not keys.has_two_copies else keys.num_keys - keys.num_near
  start = jnp.clip(row + plan.near[0], 0, keys.key.shape[1] - keys.num_near - num_far)
  rows = row + jnp.arange(plan.block)

  def piece(start, size, is_near):
    positions = start + jnp.arange(size)
    columns = jnp.where(positions < keys.num_keys, positions, positions - keys.num_keys)
    width = keys.width if is_near else keys.key.shape[2]
    part = lambda x: jax.lax.dynamic_slice_in_dim(x[..., :width], start, size, axis=1)
    return Piece(is_near, start, part(keys.key), part(keys.value), rows, columns, keys.num_keys)

  near = [piece(start, keys.num_near, True)] if keys.num_near else []
  far = [piece(start + keys.num_near, num_far, False)] if num_far else []
  return near + far
