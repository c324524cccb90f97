"""How the keys of a block of queries are laid out: near and far ones.

On the diagonals of *near* keys the relative term or what is hidden differs from pair to pair, and
is looked up. All keys right of the near ones are alike, and so are all keys left of them (band.py):
*far* pairs are plain attention, but for one number per query on the right, which is the logit of
the band's last row, or minus infinity in causal attention.

Near and far keys are of fixed numbers wherever the block lies, for the keys are laid out twice in
a row: near ones from a place in the first copy on, far ones behind them, first those on the right
and then, in the second copy, those on the left. The number on the right costs little: it is one
more element of the query, which the keys of the first copy multiply by 1, those of the second by 0.

Letters: N the heads, T the block's queries, S the keys of a piece (all keys, in `Keys.of`), P the
places in the two copies, W their width, H or H + 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.typing import Array, Float, Int

Arrays = dict[str, Array]  # by name: chunked_places.AXES has their axes


class ChunkPlan(NamedTuple):
  """What is known of a call before it is compiled.

  Attributes:
    block: the number of queries.
    first, num_diagonals: of the band: the first one's distance j - i, and how many.
    has_band: whether there are relations.
    is_causal, window, dropout_rate: as of `Inputs`.
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
    """The distances j - i of near keys, the first and the last: between them pairs differ."""
    if self.window is not None:
      left, right = self.window
      return -left, 0 if self.is_causal else right
    low, high = self.first, self.first + self.num_diagonals - 1
    return low, max(high, 0) if self.is_causal else high

  def num_near(self, num_keys: int) -> int:
    """How many of the keys are near, wherever the block lies."""
    low, high = self.near
    return min(max(self.block + high - low, 0), num_keys) if self.has_near else 0

  def num_met(self, num_keys: int) -> int:
    """How many keys a block meets."""
    return num_keys if self.has_far else self.num_near(num_keys)

  @property
  def has_far(self) -> bool:
    """Whether keys that are not near may be seen."""
    return self.window is None

  @property
  def has_near(self) -> bool:
    """Whether pairs differ at all."""
    return self.has_right or not self.has_far

  @property
  def has_right(self) -> bool:
    """Whether far keys on the right are not as those on the left."""
    return self.has_band or self.is_causal


class Keys(NamedTuple):
  """Heads' keys and values, twice in a row if far keys on the right have a number of their own.

  Then they have one more element than H: 1 in the first copy, 0 in the second.

  Attributes:
    key, value: P is S, or 2 S where they are there twice.
    num_keys: S.
    num_near: how many of them are near, wherever the block lies.
    width: H.
  """

  key: Float[Array, "N P W"]
  value: Float[Array, "N P W"]
  num_keys: int
  num_near: int
  width: int

  @classmethod
  def of(cls, plan: ChunkPlan, key: Float[Array, "N S H"], value: Float[Array, "N S H"]) -> "Keys":
    """Laid out as the plan's blocks need them."""
    _, num_keys, width = key.shape
    num_near = plan.num_near(num_keys)
    if plan.has_right and plan.has_far and num_near < num_keys:
      key, value = _twice(key), _twice(value)
    return cls(key, value, num_keys, num_near, width)

  @property
  def are_twice(self) -> bool:
    return self.key.shape[1] > self.num_keys

  def zeros(self) -> Arrays:
    """Gradients to be added to."""
    zeros = jnp.zeros((*self.key.shape[:2], self.width), self.key.dtype)
    return dict(d_key=zeros, d_value=zeros)

  def once(self, grads: Arrays) -> Arrays:
    """The gradients of S keys from those of both copies."""
    if not self.are_twice:
      return grads
    return {name: x[:, : self.num_keys] + x[:, self.num_keys :] for name, x in grads.items()}


class Piece(NamedTuple):
  """The near or the far keys of a block of queries.

  Attributes:
    start: their place in the two copies.
    key, value: W is H if they are near, else as in the copies.
    rows, columns: which queries and which keys they are.
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


def _twice(x: Float[Array, "N S H"]) -> Float[Array, "N P W"]:
  """Twice in a row, with 1 behind the elements of the first copy, 0 behind those of the second."""
  heads, size, width = x.shape
  # Written piece by piece: on a CPU a concatenation takes four times as long.
  both = jnp.zeros((heads, 2 * size, width + 1), x.dtype).at[:, :size, :width].set(x)
  both = both.at[:, size:, :width].set(x)
  return both.at[:, :size, width:].set(1)


def near_and_far(plan: ChunkPlan, keys: Keys, row: Int[Array, ""]) -> list[Piece]:
  """The keys of the block that begins at a row; the near ones, if there are any, come first."""
  # Of keys that are there once either all are far, or those that are not near are hidden.
  num_far = 0 if keys.num_near and not keys.are_twice else keys.num_keys - keys.num_near
  start = jnp.clip(row + plan.near[0], 0, keys.key.shape[1] - keys.num_near - num_far)
  rows = row + jnp.arange(plan.block)

  def piece(start, size, is_near):
    places = start + jnp.arange(size)
    columns = jnp.where(places < keys.num_keys, places, places - keys.num_keys)
    width = keys.width if is_near else keys.key.shape[2]
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x[..., :width], start, size, axis=1)
    return Piece(is_near, start, cut(keys.key), cut(keys.value), rows, columns, keys.num_keys)

  near = [piece(start, keys.num_near, True)] if keys.num_near else []
  far = [piece(start + keys.num_near, num_far, False)] if num_far else []
  return near + far
