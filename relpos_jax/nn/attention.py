"""The attention layer: projections, distance tables, the operator and its key-value cache."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from relpos_jax.attention.edges import edge_attention
from relpos_jax.attention.operator import attention_weights, dot_product_attention
from relpos_jax.nn.positions import Positions
from relpos_jax.typing import Array, Bool, Float, Int

# Variance 1 / fan-in, as Tensor2Tensor's uniform unit scaling.
kernel_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "uniform")

_FEWEST_SLOTS = 32  # of a cache, to attend to a part of it


class KVCache(NamedTuple):
  """The cache of one attention layer. Every leaf has the batch first, so a gather
  reorders rows.

  A token is found by the position stored in its slot, not by the slot. Padding takes a
  slot with position -1, which no query sees, so rows may be padded left, right or in
  between.

  Attributes:
    key, value: the projections of the tokens read, laid out as products with them want
      it.
    positions: absolute position of each slot's token; -1 where the slot is empty or
      padding.
    length: number of slots taken in each row.
  """

  key: Float[Array, "B K H S"]
  value: Float[Array, "B K S H"]
  positions: Int[Array, "B S"]
  length: Int[Array, " B"]

  def append(
    self,
    key: Float[Array, "B M K H"],
    value: Float[Array, "B M K H"],
    positions: Int[Array, "B M"],
  ) -> "KVCache":
    """Writes M tokens into the next slots of every row.

    Raises ValueError if they do not fit and `length` is concrete. Under `jit` tokens
    past the end are dropped, `length` counts them, and the row is `full` from then on.
    """
    size, new = self.positions.shape[1], positions.shape[1]
    if (
      not isinstance(self.length, jax.core.Tracer)
      and int(self.length.max()) + new > size
    ):
      raise ValueError(
        f"cache of {size} slots holds {self.length.max()} tokens: no room for {new}"
      )
    slots = jnp.add.outer(self.length, jnp.arange(new))

    @jax.vmap
    def write(cache, key_MKH, value_MKH, positions, at):
      key_KHS, value_KSH, old, length = cache
      key_KHM, value_KMH = key_MKH.transpose(1, 2, 0), value_MKH.swapaxes(0, 1)
      return KVCache(
        key_KHS.at[:, :, at].set(key_KHM.astype(key_KHS.dtype), mode="drop"),
        value_KSH.at[:, at].set(value_KMH.astype(value_KSH.dtype), mode="drop"),
        old.at[at].set(positions, mode="drop"),
        length + len(at),
      )

    return write(self, key, value, positions, slots)

  @property
  def full(self) -> Bool[Array, " B"]:
    """Returns the rows that have dropped tokens, whose attention is not that of all tokens."""
    return self.length > self.positions.shape[1]


class MultiHeadAttention(nnx.Module):
  """Multi-head attention, with `positions` if they are given.

  Vaswani et al. 2017, section 3.2.2, and Shaw et al. 2018, section 3.1. Projections
  have no bias.

  Args:
    width: D, of inputs and outputs.
    num_heads: N, query heads; a divisor of D if no `head_width` is given.
    num_key_heads: K, key and value heads, a divisor of N; N if None.
    head_width: H; D / N if None.
    positions: `RelativePositionTables` or any other `Positions`; layers given the same
      object share its parameters, which are in `tables`.
    dropout_rate: of the attention weights, in training.
    implementation: of the operator; None takes the fastest that supports the call.
    dtype: of the computation; parameters are float32.

  >>> layer = MultiHeadAttention(32, 4, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 32)), is_causal=True).shape
  (2, 5, 32)

  From one sequence to another, positions of both count in the same unit: for frames
  twice as dense as tokens, `query_positions=2 * jnp.arange(5)` beside a memory of ten.

  Attention weights [B, N, T, S] of every layer of a model can be captured:

  >>> layer.set_attributes(sow_weights=True)
  >>> _, sown = nnx.capture(layer, nnx.Intermediate)(jnp.ones((2, 5, 32)))
  >>> [weights.shape for weights in sown["weights"]]
  [(2, 4, 5, 5)]
  """

  def __init__(
    self,
    width: int,
    num_heads: int,
    *,
    num_key_heads: int | None = None,
    head_width: int | None = None,
    positions: Positions | None = None,
    dropout_rate: float = 0.0,
    implementation: str | None = None,
    dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    if head_width is None and width % num_heads:
      raise ValueError(f"width is {width}; want a multiple of num_heads, {num_heads}")
    head_width = width // num_heads if head_width is None else head_width
    if not isinstance(positions, Positions | None):
      raise ValueError(
        f"positions is {positions!r:.60}; want Positions such as AlibiPositions(8)"
      )
    self.key_shape = (num_heads if num_key_heads is None else num_key_heads, head_width)
    options = dict(use_bias=False, kernel_init=kernel_init, dtype=dtype, rngs=rngs)
    self.query = nnx.LinearGeneral(width, (num_heads, head_width), **options)
    self.key = nnx.LinearGeneral(width, self.key_shape, **options)
    self.value = nnx.LinearGeneral(width, self.key_shape, **options)
    self.out = nnx.LinearGeneral(
      (num_heads, head_width), width, axis=(-2, -1), **options
    )
    self.tables = positions  # the name in checkpoints
    self.dropout_rate = dropout_rate
    self.implementation = implementation
    self.dtype = dtype
    self.sow_weights = False

  def __call__(
    self,
    x: Float[Array, "B T D"],
    memory: Float[Array, "B S D"] | None = None,
    *,
    rngs: nnx.Rngs | None = None,
    **options,
  ) -> Float[Array, "B T D"]:
    """Attends from `x` to `memory`, or to itself; with `rngs`, applies dropout.

    Further options are the operator's: mask, is_causal, query_positions,
    key_segment_ids, ...
    """
    return self.attend(
      x, *self.keys_values(x if memory is None else memory), rngs=rngs, **options
    )

  def keys_values(
    self, memory: Float[Array, "B S D"]
  ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Projects a memory to keys and values, once for many calls of `attend`."""
    return self.key(memory), self.value(memory)

  def attend(
    self,
    x: Float[Array, "B T D"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    rngs: nnx.Rngs | None = None,
    **options,
  ) -> Float[Array, "B T D"]:
    """Attends from `x` to projected keys and values.

    For graphs, pass `relations` to a layer without positions, or the `senders` and
    `receivers` of a list of edges with the options of `edge_attention`.
    """
    query = self.query(x)
    dropout = {}
    if rngs is not None and self.dropout_rate:
      dropout = dict(dropout_rate=self.dropout_rate, dropout_key=rngs.dropout())
    if self.tables is not None and (given := {"relations", "senders"} & options.keys()):
      raise ValueError(
        f"a layer with positions takes no {given.pop()}: make it without positions="
      )
    if "senders" in options:
      return self.out(edge_attention(query, key, value, **options, **dropout))
    options |= dict(query=query, key=key)
    if self.tables is not None:
      names = "query_positions", "key_positions", "query_offset"
      options |= self.tables.arguments(query, key, *map(options.get, names))
    if self.sow_weights:
      self.sow(nnx.Intermediate, "weights", attention_weights(**options))
    options |= dict(value=value, implementation=self.implementation, **dropout)
    return self.out(dot_product_attention(**options))

  def decode(
    self,
    x: Float[Array, "B M D"],
    cache: KVCache,
    positions: Int[Array, "B M"],
    mask: Bool[Array, "B 1 M S"] | None = None,
  ) -> tuple[Float[Array, "B M D"], KVCache]:
    """Reads M more tokens at absolute `positions` (-1: padding) and attends causally.

    Reading M tokens at once or one by one gives the same as the full causal pass. Rows
    for which the cache is too small become NaN. A mask hides slots, for example from
    other hypotheses.
    """
    cache = cache.append(*self.keys_values(x), positions)
    mask = jnp.ones((1, 1, 1, 1), bool) if mask is None else mask
    mask &= (cache.positions >= 0)[:, None, None]

    def attend(num_slots: int) -> Float[Array, "B M D"]:
      return self.attend(
        x,
        cache.key[..., :num_slots].transpose(0, 3, 1, 2),
        cache.value[:, :, :num_slots].swapaxes(1, 2),
        mask=mask[..., :num_slots],
        is_causal=True,
        query_positions=positions,
        key_positions=cache.positions[:, :num_slots],
      )

    sizes = [cache.positions.shape[1]]
    # Prompts are read with one program for any size: they are few, and compiling takes
    # longer.
    while sizes[0] >= 4 * _FEWEST_SLOTS and x.shape[1] <= 8 and not self.sow_weights:
      sizes.insert(0, -(-sizes[0] // 4))
    in_use = jnp.max(jnp.where(cache.positions >= 0, jnp.arange(1, sizes[-1] + 1), 0))
    branches = [functools.partial(attend, size) for size in sizes]
    y = jax.lax.switch(jnp.searchsorted(jnp.array(sizes), in_use), branches)
    return jnp.where(cache.full[:, None, None], jnp.nan, y), cache

  def init_cache(self, batch_size: int, num_slots: int) -> KVCache:
    """Returns an empty cache of this layer's shape and dtype."""
    heads, width = self.key_shape
    key = jnp.zeros((batch_size, heads, width, num_slots), self.dtype)
    positions = jnp.full((batch_size, num_slots), -1, jnp.int32)
    return KVCache(
      key, key.swapaxes(2, 3), positions, jnp.zeros((batch_size,), jnp.int32)
    )
