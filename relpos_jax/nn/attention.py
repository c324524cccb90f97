"""The attention layer: projections, distance tables and the operator."""

import jax
import jax.numpy as jnp
from flax import nnx

from relpos_jax.attention.edges import edge_attention
from relpos_jax.attention.operator import attention_weights, dot_product_attention
from relpos_jax.attention.validation import check_sizes, check_width
from relpos_jax.nn.cache import KVCache, empty_cache
from relpos_jax.nn.positions import RelativePositionTables
from relpos_jax.typing import Array, Bool, Float, Int

# Variance 1 / fan-in, as Tensor2Tensor's uniform unit scaling.
kernel_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "uniform")


class MultiHeadAttention(nnx.Module):
  """Multi-head attention, with relative positions if `tables` are given.

  Vaswani et al. 2017, section 3.2.2, and Shaw et al. 2018, section 3.1. Projections have no bias.

  Args:
    width: D, of inputs and outputs.
    num_heads: N, query heads.
    num_key_heads: K, key and value heads; N if None.
    head_width: H; D / N if None.
    tables: of relative positions; layers given the same object share them.
    dropout_rate: of the attention weights, in training.
    implementation: of the operator; None takes the fastest that supports the call.
    dtype: of the computation; parameters are float32.

  Raises:
    ValueError: a size is less than 1; no `head_width` is given, and N does not divide D; or
      `num_key_heads` does not divide N.

  >>> layer = MultiHeadAttention(32, 4, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 32)), is_causal=True).shape
  (2, 5, 32)

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
    tables: RelativePositionTables | None = None,
    dropout_rate: float = 0.0,
    implementation: str | None = None,
    dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_sizes(1, width=width, num_heads=num_heads)
    if head_width is None and width % num_heads:
      raise ValueError(f"width is {width}; want a multiple of num_heads, {num_heads}")
    head_width = width // num_heads if head_width is None else head_width
    num_key_heads = num_heads if num_key_heads is None else num_key_heads
    check_sizes(1, head_width=head_width, num_key_heads=num_key_heads)
    if num_heads % num_key_heads:
      raise ValueError(
        f"num_key_heads is {num_key_heads}; want a divisor of num_heads, {num_heads}"
      )
    self.width = width
    self.key_shape = (num_key_heads, head_width)
    options = dict(use_bias=False, kernel_init=kernel_init, dtype=dtype, rngs=rngs)
    self.query = nnx.LinearGeneral(width, (num_heads, head_width), **options)
    self.key = nnx.LinearGeneral(width, self.key_shape, **options)
    self.value = nnx.LinearGeneral(width, self.key_shape, **options)
    self.out = nnx.LinearGeneral((num_heads, head_width), width, axis=(-2, -1), **options)
    self.tables = tables
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

    Further options are the operator's: mask, is_causal, query_positions, key_segment_ids, ...
    """
    check_width("x", x, self.width)
    key, value = self.keys_values(x if memory is None else memory)
    return self.attend(x, key, value, rngs=rngs, **options)

  def keys_values(
    self, memory: Float[Array, "B S D"]
  ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Projects a memory to keys and values, once for many calls of `attend`."""
    check_width("memory", memory, self.width)
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

    For graphs, pass `relations` to a layer without tables, or the `senders` and `receivers` of a
    list of edges with the options of `edge_attention`.
    """
    check_width("x", x, self.width)
    query = self.query(x)
    if "senders" in options:
      return self.out(edge_attention(query, key, value, **options, **self._dropout(rngs)))
    if self.tables is not None:
      options["relations"] = self.tables()
    if self.sow_weights:
      self.sow(nnx.Intermediate, "weights", attention_weights(query, key, **options))
    options |= self._dropout(rngs)
    return self.out(
      dot_product_attention(query, key, value, implementation=self.implementation, **options)
    )

  def _dropout(self, rngs: nnx.Rngs | None) -> dict:
    if rngs is None or not self.dropout_rate:
      return {}
    return dict(dropout_rate=self.dropout_rate, dropout_key=rngs.dropout())

  def decode(
    self, x: Float[Array, "B M D"], cache: KVCache, positions: Int[Array, "B M"]
  ) -> tuple[Float[Array, "B M D"], KVCache]:
    """Reads M more tokens at absolute `positions` (-1: padding) and attends causally.

    Reading M tokens at once or one by one gives the same as the full causal pass.
    """
    check_width("x", x, self.width)
    cache = cache.append(*self.keys_values(x), positions)
    filled: Bool[Array, "B 1 1 S"] = cache.filled[:, None, None]
    y = self.attend(
      x,
      cache.key,
      cache.value,
      mask=filled,
      is_causal=True,
      query_positions=positions,
      key_positions=cache.positions,
    )
    return y, cache

  def init_cache(self, batch_size: int, num_slots: int) -> KVCache:
    """Returns an empty cache of this layer's shape and dtype."""
    return empty_cache(batch_size, num_slots, *self.key_shape, dtype=self.dtype)
