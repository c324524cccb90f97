"""Parts shared by the models: the config of layers, embeddings, self-attention layers."""

import dataclasses
import functools
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from relpos_jax.nn.attention import MultiHeadAttention
from relpos_jax.nn.blocks import FeedForward, Residual
from relpos_jax.nn.cache import KVCache
from relpos_jax.nn.constraints import constrain_activations, constrain_table
from relpos_jax.nn.positions import RelativePositionTables, sinusoids
from relpos_jax.typing import Array, Float, Int

PAD = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayersConfig:
  """Options of the layers; the defaults are the paper's base model.

  Attributes:
    num_layers: in each stack.
    width: D.
    num_heads: N, each of width D / N.
    feed_forward: hidden width of the feed-forward layers.
    positions: "relative" (tables in every self-attention), "sinusoidal" (added to embeddings),
      "both", or "none".
    max_distance: k, the clipping distance.
    tables_per_head: each head has its own tables `[2k+1, H]` (base), or all share them (big).
    tables_per_layer: each layer has its own tables, or the layers of a stack share them.
    relative_keys, relative_values: whether there are the two terms (Table 3).
    beyond: "clip" or "zero" beyond distance k.
    norm: "pre", with a final norm on each stack (Tensor2Tensor from October 2017), or "post"
      (its first code).
    embedding_dropout_rate, dropout_rate, attention_dropout_rate, feed_forward_dropout_rate: on
      embeddings, sub-layer outputs, attention weights, and after the ReLU.
    dtype: of the computation; parameters are float32.
    implementation: of attention; None takes the fastest.

  Raises:
    ValueError: a value is not one of its choices, or two values exclude each other.
  """

  num_layers: int = 6
  width: int = 512
  num_heads: int = 8
  feed_forward: int = 1024
  positions: Literal["relative", "sinusoidal", "both", "none"] = "relative"
  max_distance: int = 16
  tables_per_head: bool = True
  tables_per_layer: bool = True
  relative_keys: bool = True
  relative_values: bool = True
  beyond: Literal["clip", "zero"] = "clip"
  norm: Literal["pre", "post"] = "pre"
  embedding_dropout_rate: float = 0.1
  dropout_rate: float = 0.1
  attention_dropout_rate: float = 0.0
  feed_forward_dropout_rate: float = 0.0
  dtype: Literal["float32", "bfloat16"] = "float32"
  implementation: str | None = None

  def __post_init__(self):
    for field in ("positions", "beyond", "norm", "dtype"):
      value, choices = getattr(self, field), get_args(LayersConfig.__annotations__[field])
      if value not in choices:
        raise ValueError(f"{field} is {value!r}; want one of {', '.join(choices)}")
    if self.width % self.num_heads:
      raise ValueError(f"width is {self.width}; want a multiple of num_heads, {self.num_heads}")

  @property
  def has_tables(self) -> bool:
    """Returns whether self-attention has relative positions."""
    relative = self.positions in ("relative", "both")
    return relative and (self.relative_keys or self.relative_values)


class Cache(NamedTuple):
  """The cache of a stack: one for each layer, and the next position of each row."""

  layers: tuple[KVCache, ...]
  next_position: Int[Array, " B"]

  @classmethod
  def empty(cls, layers, batch_size: int, num_slots: int) -> "Cache":
    """Returns an empty cache of layers for `num_slots` tokens, padding included."""
    caches = tuple(layer.self_attention.init_cache(batch_size, num_slots) for layer in layers)
    return cls(caches, jnp.zeros((batch_size,), jnp.int32))

  def next_positions(self, tokens: Int[Array, "B M"]) -> tuple[Int[Array, "B M"], Int[Array, " B"]]:
    """Returns the positions of the next tokens, and the position that follows them in each row.

    Padding, anywhere, has position -1: it takes a slot of the cache but no position.
    """
    real = tokens != PAD
    positions = self.next_position[:, None] + jnp.cumsum(real, axis=1) - 1
    return jnp.where(real, positions, -1), self.next_position + real.sum(axis=1)


class Embedding(nnx.Module):
  """Embeds tokens, N(0, 1/D) times sqrt(D), with sinusoids if asked for; maps vectors to logits."""

  def __init__(self, config: LayersConfig, vocab_size: int, *, rngs: nnx.Rngs):
    init = jax.nn.initializers.normal(config.width**-0.5)
    self.table = nnx.Param(init(rngs.params(), (vocab_size, config.width)))
    self.sinusoidal = config.positions in ("sinusoidal", "both")
    self.dropout = nnx.Dropout(config.embedding_dropout_rate)
    self.dtype = config.dtype

  def __call__(
    self,
    tokens: Int[Array, "B T"],
    *,
    positions: Int[Array, "B T"] | None = None,
    rngs: nnx.Rngs | None = None,
  ) -> Float[Array, "B T D"]:
    """Embeds tokens at `positions`, by default 0, 1, 2, ..."""
    width = self.table.shape[1]
    x = jnp.take(constrain_table(self.table[...]), tokens, axis=0, mode="clip")
    x = constrain_activations(x * width**0.5)
    if self.sinusoidal:
      positions = jnp.arange(tokens.shape[1]) if positions is None else positions
      x += sinusoids(positions, width)
    return self.dropout(x.astype(self.dtype), deterministic=rngs is None, rngs=rngs)

  def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Returns float32 logits: products with the embedding of each token."""
    table = self.table[...].astype(self.dtype)
    return jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32)


class SelfAttentionLayer(nnx.Module):
  """Self-attention and a feed-forward layer, each with its residual connection."""

  def __init__(self, config: LayersConfig, tables, *, rngs: nnx.Rngs):
    self.self_attention = make_attention(config, tables, rngs)
    self.feed_forward = make_feed_forward(config, rngs)
    self.residuals = nnx.List([make_residual(config, rngs) for _ in range(2)])

  def __call__(self, x, rngs: nnx.Rngs | None = None, **options):
    """Applies the layer; `options` are the operator's: mask, is_causal, ..."""
    around = self.residuals[0]
    y = self.self_attention(around.before(x), rngs=rngs, **options)
    return self._feed(around.after(x, y, rngs), rngs)

  def decode(self, x, cache: KVCache, positions):
    """Reads more tokens with a cache."""
    around = self.residuals[0]
    y, cache = self.self_attention.decode(around.before(x), cache, positions)
    return self._feed(around.after(x, y)), cache

  def _feed(self, x, rngs: nnx.Rngs | None = None):
    around = self.residuals[1]
    return around.after(x, self.feed_forward(around.before(x), rngs), rngs)


def table_maker(config: LayersConfig, rngs: nnx.Rngs):
  """Returns a factory of position tables: one per layer, one shared, or none."""
  if not config.has_tables:
    return lambda: None
  make = functools.partial(
    RelativePositionTables,
    config.max_distance,
    config.width // config.num_heads,
    num_heads=config.num_heads if config.tables_per_head else None,
    keys=config.relative_keys,
    values=config.relative_values,
    beyond=config.beyond,
    dtype=config.dtype,
    rngs=rngs,
  )
  return make if config.tables_per_layer else functools.cache(make)


def make_attention(config: LayersConfig, tables, rngs: nnx.Rngs) -> MultiHeadAttention:
  """Returns an attention layer."""
  return MultiHeadAttention(
    config.width,
    config.num_heads,
    tables=tables,
    dropout_rate=config.attention_dropout_rate,
    implementation=config.implementation,
    dtype=config.dtype,
    rngs=rngs,
  )


def make_feed_forward(config: LayersConfig, rngs: nnx.Rngs) -> FeedForward:
  """Returns a feed-forward layer."""
  return FeedForward(
    config.width,
    config.feed_forward,
    dropout_rate=config.feed_forward_dropout_rate,
    dtype=config.dtype,
    rngs=rngs,
  )


def make_residual(config: LayersConfig, rngs: nnx.Rngs) -> Residual:
  """Returns the residual connection of a sub-layer."""
  return Residual(
    config.width, norm=config.norm, dropout_rate=config.dropout_rate, dtype=config.dtype, rngs=rngs
  )


def last_norm(config: LayersConfig, rngs: nnx.Rngs):
  """Returns the norm at the end of a stack: pre-norm leaves the sum of residuals unscaled."""
  if config.norm == "post":
    return _identity
  return nnx.LayerNorm(config.width, dtype=config.dtype, rngs=rngs)


def _identity(x):
  return x
