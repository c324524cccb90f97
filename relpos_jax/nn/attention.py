"""The attention layer: projections, positions, the operator and a cache."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from relpos_jax.attention.arrays import check_array, range_of
from relpos_jax.attention.edges import edge_attention
from relpos_jax.attention.operator import attention_weights, dot_product_attention
from relpos_jax.nn.positions import Positions
from relpos_jax.nn.rolling_cache import RollingCache
from relpos_jax.typing import Array, ArrayLike, Bool, Float, Int

kernel_init = jax.nn.initializers.lecun_uniform()  # Tensor2Tensor's unit scaling

FEWEST_SLOTS = 32  # the smallest part of a cache to attend to


class KVCache(NamedTuple):
  """Stores the keys and values of one attention layer.

  The batch is the first axis of every array, so that a gather reorders sequences. Each
  slot stores the position of its token. Padding takes a slot with position -1, which is
  masked. So sequences may be padded on the left, on the right or in between.

  Attributes:
    key, value: the projections of the tokens read so far, in layouts that make products
      transpose nothing.
    positions: the position of the token in each slot, -1 for empty slots and padding.
    length: the number of slots taken by each sequence, padding included.
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
    """Writes M tokens into the next slots of every sequence.

    If the tokens do not fit and `length` is concrete, raises ValueError. Under `jit` it
    drops the tokens past the end, but counts them in `length`, so that `full` is True.
    """
    num_slots = self.positions.shape[1]
    num_new = positions.shape[1]
    _, longest = range_of(self.length)  # -1 if it is not concrete
    if longest >= 0 and longest + num_new > num_slots:
      raise ValueError(
        f"cache of {num_slots} slots holds {longest} tokens: no room for {num_new}"
      )
    return jax.vmap(KVCache._write)(self, key, value, positions)

  def _write(self, key_MKH, value_MKH, positions) -> "KVCache":
    """Writes the tokens of one sequence, without a batch axis."""
    num_new = len(positions)
    slots = self.length + jnp.arange(num_new)
    key_KHM = key_MKH.transpose(1, 2, 0)
    value_KMH = value_MKH.swapaxes(0, 1)
    key = self.key.at[:, :, slots].set(key_KHM, mode="drop")
    value = self.value.at[:, slots].set(value_KMH, mode="drop")
    positions = self.positions.at[slots].set(positions, mode="drop")
    return KVCache(key, value, positions, self.length + num_new)

  @property
  def full(self) -> Bool[Array, " B"]:
    """Returns for which sequences `append` dropped tokens: the cache was too small."""
    return self.length > self.positions.shape[1]


class MultiHeadAttention(nnx.Module):
  """Computes multi-head attention, with or without relative positions.

  Vaswani et al. 2017, section 3.2.2, and Shaw et al. 2018, section 3.1. Projections
  have no bias.

  Args:
    width: D, the width of inputs and outputs.
    num_heads: N, the number of query heads. It divides D if `head_width` is None.
    num_key_heads: K, the number of key and value heads, a divisor of N. None means N.
    head_width: H. None means D / N.
    positions: `RelativePositionTables` or any other `Positions`. Its parameters are
      under `tables`. Layers with the same object share them.
    dropout_rate: dropout of the attention weights, in training.
    implementation: name for the operator; None chooses the fastest.
    dtype: the dtype of the computation; parameters are float32.

  >>> layer = MultiHeadAttention(32, 4, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 32)), is_causal=True).shape
  (2, 5, 32)

  In attention from one sequence to another, both need positions in the same unit. For
  example, 5 tokens may attend to 10 frames, two per token: then give
  `query_positions=2 * jnp.arange(5)`.

  To capture the attention weights [B, N, T, S] of every layer in a model, but not those
  along a list of edges:

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
    if head_width is None:
      head_width, remainder = divmod(width, num_heads)
      if remainder:
        raise ValueError(f"width is {width}; want a multiple of num_heads, {num_heads}")
    if num_key_heads is None:
      num_key_heads = num_heads
    if num_heads % num_key_heads:
      raise ValueError(
        f"num_key_heads is {num_key_heads}; want a divisor of num_heads, {num_heads}"
      )
    if not isinstance(positions, Positions | None):
      raise ValueError(
        f"positions is {positions!r:.60}; want Positions such as AlibiPositions(8)"
      )
    query_shape = num_heads, head_width
    self.key_shape = num_key_heads, head_width
    linear = functools.partial(
      nnx.LinearGeneral,
      use_bias=False,
      kernel_init=kernel_init,
      dtype=dtype,
      rngs=rngs,
    )
    self.query = linear(width, query_shape)
    self.key = linear(width, self.key_shape)
    self.value = linear(width, self.key_shape)
    self.out = linear(query_shape, width, axis=(-2, -1))
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
    **options: Any,
  ) -> Float[Array, "B T D"]:
    """Attends from `x` to `memory`, such as the encoder's output, or to `x` itself.

    With `rngs` it applies dropout. Other options go to the operator: mask, is_causal,
    query_positions, key_segment_ids, ...
    """
    if memory is None:
      memory = x
    key, value = self.keys_values(memory)
    return self.attend(x, key, value, rngs=rngs, **options)

  def keys_values(
    self, memory: Float[Array, "B S D"]
  ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Projects `memory` to keys and values, for any number of calls of `attend`."""
    return self.key(memory), self.value(memory)

  def attend(
    self,
    x: Float[Array, "B T D"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    rngs: nnx.Rngs | None = None,
    **options: Any,
  ) -> Float[Array, "B T D"]:
    """Attends from `x` to projected keys and values.

    For graphs, make a layer without positions, and pass `relations`. Or pass the
    `senders` and `receivers` of a list of edges, with other options of
    `edge_attention`.
    """
    query = self.query(x)
    arguments = dict(query=query, key=key)
    if self.tables is not None:
      names = "query_positions", "key_positions", "query_offset"
      arguments = self.tables.arguments(query, key, *map(options.get, names))
      refused = sorted({"relations", "senders", *arguments} & options.keys())
      if refused:
        raise ValueError(
          f"a layer with positions takes no {refused[0]}: make it without positions="
        )
    implementation = options.pop("implementation", self.implementation)
    options |= arguments
    is_of_edges = "senders" in options
    if self.sow_weights and not is_of_edges:
      self.sow(nnx.Intermediate, "weights", attention_weights(**options))
    if rngs is not None and self.dropout_rate:
      options |= dict(dropout_rate=self.dropout_rate, dropout_key=rngs.dropout())
    if is_of_edges:
      return self.out(edge_attention(value=value, **options))
    options |= dict(value=value, implementation=implementation)
    return self.out(dot_product_attention(**options))

  def decode(
    self,
    x: Float[Array, "B M D"],
    cache: KVCache | RollingCache,
    positions: ArrayLike,
    mask: Bool[Array, "B 1 M S"] | None = None,
  ) -> tuple[Float[Array, "B M D"], KVCache | RollingCache]:
    """Reads M more tokens into the cache, and attends causally from them.

    `positions` are absolute, `[B, M]`, and -1 for padding. Reading tokens at once or
    one by one gives the same results as a full causal pass. Raises ValueError if the
    cache is too small for a sequence; under `jax.jit` its results become NaN. A mask
    excludes slots, such as the tokens of other hypotheses.

    A rolling cache of W slots never becomes full. Its results equal those of a full
    pass with `is_causal=True, local_window_size=(W - 1, 0)`. It takes no mask:

    >>> layer = MultiHeadAttention(8, 2, rngs=nnx.Rngs(0))
    >>> cache = layer.init_rolling_cache(batch_size=1, window=4)
    >>> x = jax.random.normal(jax.random.key(0), (1, 9, 8))
    >>> for i in range(9):
    ...   y, cache = layer.decode(x[:, [i]], cache, jnp.array([[i]]))
    >>> full = layer(x, is_causal=True, local_window_size=(3, 0))
    >>> bool(jnp.allclose(y, full[:, 8:], atol=1e-6))
    True
    """
    positions = check_array("positions", positions, jnp.integer, x.shape[:2])
    positions = positions.astype(jnp.int32)
    batch, batch_of_cache = x.shape[0], cache.positions.shape[0]
    if batch_of_cache != batch:
      raise ValueError(f"cache has batch size {batch_of_cache}; want {batch}, as x")
    if isinstance(cache, RollingCache):
      if mask is not None:
        raise ValueError("a rolling cache takes no mask")
      return self._decode_in_window(x, cache, positions)
    key, value = self.keys_values(x)
    cache = cache.append(key, value, positions)
    is_token = cache.positions >= 0
    is_token_B11S = is_token[:, None, None]
    mask = is_token_B11S if mask is None else mask & is_token_B11S
    num_slots = is_token.shape[1]
    sizes = [num_slots]
    # It attends to a part of the cache only for few tokens, as in decoding. For a
    # prompt, compiling a branch for each size would take longer than it saves.
    if x.shape[1] <= 8 and not self.sow_weights:
      sizes = _part_sizes(num_slots)
    slots = jnp.arange(1, num_slots + 1)
    num_in_use = jnp.max(jnp.where(is_token, slots, 0), initial=0)
    part = jnp.searchsorted(jnp.array(sizes), num_in_use)
    branches = [functools.partial(self._attend_to_part, size) for size in sizes]
    y = jax.lax.switch(part, branches, x, cache, positions, mask)
    return jnp.where(cache.full[:, None, None], jnp.nan, y), cache

  def _decode_in_window(
    self, x: Array, cache: RollingCache, positions: Array
  ) -> tuple[Float[Array, "B M D"], RollingCache]:
    """Attends to the cached and the new tokens, then caches the new ones."""
    tokens = *self.keys_values(x), positions
    key, value, key_positions = cache.with_tokens(*tokens)
    y = self.attend(
      x,
      key,
      value,
      mask=(key_positions >= 0)[:, None, None],
      is_causal=True,
      local_window_size=(cache.window - 1, 0),
      query_positions=positions,
      key_positions=key_positions,
    )
    return y, cache.write(*tokens)

  def _attend_to_part(
    self, num_slots: int, x: Array, cache: KVCache, positions: Array, mask: Array
  ) -> Float[Array, "B M D"]:
    """Attends to the first `num_slots` slots of a cache."""
    return self.attend(
      x,
      cache.key[..., :num_slots].transpose(0, 3, 1, 2),
      cache.value[:, :, :num_slots].swapaxes(1, 2),
      mask=mask[..., :num_slots],
      is_causal=True,
      query_positions=positions,
      key_positions=cache.positions[:, :num_slots],
    )

  def init_cache(self, batch_size: int, num_slots: int) -> KVCache:
    """Returns an empty cache for this layer."""
    heads, width = self.key_shape
    key = jnp.zeros((batch_size, heads, width, num_slots), self.dtype)
    positions = jnp.full((batch_size, num_slots), -1, jnp.int32)
    length = jnp.zeros(batch_size, jnp.int32)
    return KVCache(key, key.swapaxes(2, 3), positions, length)

  def init_rolling_cache(self, batch_size: int, window: int) -> RollingCache:
    """Returns an empty cache for attention to the last `window` tokens."""
    if window < 1:
      raise ValueError(f"window is {window}; want 1 or more")
    shape = batch_size, window, *self.key_shape
    key, value = jnp.zeros((2, *shape), self.dtype)  # two, so that they can be donated
    positions = jnp.full((batch_size, window), -1, jnp.int32)
    return RollingCache(key, value, positions)


def _part_sizes(num_slots: int) -> list[int]:
  """Returns sizes for parts of a cache, each about four times the one before."""
  sizes = [num_slots]
  while sizes[-1] >= 4 * FEWEST_SLOTS:
    sizes.append(math.ceil(sizes[-1] / 4))
  return sizes[::-1]
