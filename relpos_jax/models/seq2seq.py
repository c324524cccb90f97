"""The encoder-decoder Transformer of Vaswani et al. 2017 with the positions of Shaw et al. 2018."""

import dataclasses
import functools
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from relpos_jax.nn.attention import MultiHeadAttention
from relpos_jax.nn.blocks import FeedForward, Residual
from relpos_jax.nn.cache import KVCache
from relpos_jax.nn.placement import in_place, whole_rows
from relpos_jax.nn.positions import RelativePositionTables, sinusoids
from relpos_jax.typing import Array, Bool, Float, Int

PAD = 0


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """Every switch of the model; the defaults are the paper's base model.

  Attributes:
    source_vocab_size, target_vocab_size: V of either side; equal where embeddings are shared.
    num_layers: of the encoder, and of the decoder.
    width: D. num_heads: N, each of width D / N. feed_forward: its hidden width.
    positions: "relative" (tables in every self-attention), "sinusoidal" (added to embeddings),
      "both", or "none".
    max_distance: k, the clipping distance.
    tables_per_head: each head has tables `[2k+1, H]` of its own (base), or all share (big).
    tables_per_layer: each layer has its own, or the layers of a stack share.
    relative_keys, relative_values: which terms there are (Table 3); neither: no tables.
    beyond: "clip" or "zero" beyond distance k.
    norm: "pre", with a last norm on each stack (T2T from October 2017), or "post" (the first code).
    embedding_dropout_rate, dropout_rate, attention_dropout_rate, feed_forward_dropout_rate: on
      embeddings, sub-layer outputs, attention weights, and after the ReLU.
    share_embeddings: one matrix for source, target and softmax, or three.
    dtype: of the computation; parameters are float32.
    implementation: of the attention operator; None takes the fastest.

  Raises:
    ValueError: a value is none of its choices, or two do not go together.
  """

  source_vocab_size: int
  target_vocab_size: int
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
  share_embeddings: bool = True
  dtype: Literal["float32", "bfloat16"] = "float32"
  implementation: str | None = None

  def __post_init__(self):
    for field in ("positions", "beyond", "norm", "dtype"):
      value, choices = getattr(self, field), get_args(self.__annotations__[field])
      if value not in choices:
        raise ValueError(f"{field} is {value!r}; want one of {', '.join(choices)}")
    if self.width % self.num_heads:
      raise ValueError(f"width is {self.width}; want a multiple of num_heads, {self.num_heads}")
    if self.share_embeddings and self.source_vocab_size != self.target_vocab_size:
      sizes = f"{self.source_vocab_size} and {self.target_vocab_size}"
      raise ValueError(f"share_embeddings with vocabularies of {sizes}; want one size")

  @property
  def has_tables(self) -> bool:
    """Whether self-attention knows distances."""
    relative = self.positions in ("relative", "both")
    return relative and (self.relative_keys or self.relative_values)


class Memory(NamedTuple):
  """An encoded source as the decoder sees it: each layer's keys and values, and what is padding."""

  keys_values: tuple[tuple[Float[Array, "B S N H"], Float[Array, "B S N H"]], ...]
  mask: Bool[Array, "B 1 1 S"]


class DecoderCache(NamedTuple):
  """What the decoder has read: a cache a layer, and the next position of each row."""

  layers: tuple[KVCache, ...]
  next_position: Int[Array, " B"]


class Transformer(nnx.Module):
  """From source and target tokens to logits of the next target token.

  Token 0 is padding, anywhere in a source and at the end of a target: no effect on other tokens, no
  gradient. `rngs` switches dropout on.

  >>> config = TransformerConfig(50, 50, num_layers=1, width=16, num_heads=2)
  >>> model = nnx.jit(lambda: Transformer(config, rngs=nnx.Rngs(0)))()
  >>> source, target_input = jnp.ones((2, 7), int), jnp.ones((2, 5), int)
  >>> jax.jit(model.__call__)(source, target_input).shape
  (2, 5, 50)

  The same, one token at a time:

  >>> memory, cache = jax.jit(model.remember)(source), model.init_cache(2, num_slots=5)
  >>> logits, cache = jax.jit(model.decode)(target_input[:, :1], cache, memory)
  >>> logits.shape
  (2, 1, 50)
  """

  def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
    self.source_embedding = Embedding(config, config.source_vocab_size, rngs=rngs)
    if config.share_embeddings:
      self.target_embedding = self.softmax = self.source_embedding
    else:
      self.target_embedding = Embedding(config, config.target_vocab_size, rngs=rngs)
      self.softmax = Embedding(config, config.target_vocab_size, rngs=rngs)
    self.encoder = Encoder(config, _table_maker(config, rngs), rngs=rngs)
    self.decoder = Decoder(config, _table_maker(config, rngs), rngs=rngs)

  def __call__(
    self,
    source: Int[Array, "B S"],
    target_input: Int[Array, "B T"],
    rngs: nnx.Rngs | None = None,
  ) -> Float[Array, "B T V"]:
    """Logits, float32, of the token after each of `target_input`."""
    mask = _padding_mask(source)
    memory = self.encoder(self.source_embedding(source, rngs=rngs), mask, rngs)
    x = self.target_embedding(target_input, rngs=rngs)
    return self.softmax.logits(self.decoder(x, memory, mask, rngs))

  def encode(self, source: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """The encoder's output, one vector a source token."""
    return self.encoder(self.source_embedding(source), _padding_mask(source))

  def remember(self, source: Int[Array, "B S"]) -> Memory:
    """Encodes a source once, for decoding many tokens."""
    return Memory(self.decoder.keys_values(self.encode(source)), _padding_mask(source))

  def init_cache(self, batch_size: int, num_slots: int) -> DecoderCache:
    """A decoder that has read nothing and may read `num_slots` tokens, padding included."""
    return DecoderCache(
      tuple(
        layer.self_attention.init_cache(batch_size, num_slots) for layer in self.decoder.layers
      ),
      jnp.zeros((batch_size,), jnp.int32),
    )

  def decode(
    self, tokens: Int[Array, "B M"], cache: DecoderCache, memory: Memory
  ) -> tuple[Float[Array, "B M V"], DecoderCache]:
    """Reads M more target tokens and gives the logits after each.

    Padding, here anywhere, takes a slot of the cache but no position.
    """
    real = tokens != PAD
    positions = cache.next_position[:, None] + jnp.cumsum(real, axis=1) - 1
    positions = jnp.where(real, positions, -1)
    x = self.target_embedding(tokens, positions=jnp.maximum(positions, 0))
    x, layers = self.decoder.decode(x, cache.layers, positions, memory)
    return self.softmax.logits(x), DecoderCache(layers, cache.next_position + real.sum(axis=1))


class Embedding(nnx.Module):
  """Tokens to vectors, N(0, 1/D) times sqrt(D), with sinusoids where asked for; and to logits."""

  def __init__(self, config: TransformerConfig, vocab_size: int, *, rngs: nnx.Rngs):
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
    """Embeds tokens at `positions`, 0, 1, 2, ... if not given."""
    width = self.table.shape[1]
    x = jnp.take(whole_rows(self.table[...]), tokens, axis=0, mode="clip")
    x = in_place(x * width**0.5)
    if self.sinusoidal:
      positions = jnp.arange(tokens.shape[1]) if positions is None else positions
      x += sinusoids(positions, width)
    return self.dropout(x.astype(self.dtype), deterministic=rngs is None, rngs=rngs)

  def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Scores of every token, float32: products with its embedding."""
    table = self.table[...].astype(self.dtype)
    return jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32)


class EncoderLayer(nnx.Module):
  """Self-attention and feed-forward, each with its residual."""

  def __init__(self, config: TransformerConfig, tables, *, rngs: nnx.Rngs):
    self.self_attention = _attention(config, tables, rngs)
    self.feed_forward = _feed_forward(config, rngs)
    self.residuals = nnx.List([_residual(config, rngs) for _ in range(2)])

  def __call__(self, x, mask, rngs=None):
    around_attention, around_feed_forward = self.residuals
    y = self.self_attention(around_attention.before(x), mask=mask, rngs=rngs)
    x = around_attention.after(x, y, rngs)
    y = self.feed_forward(around_feed_forward.before(x), rngs)
    return around_feed_forward.after(x, y, rngs)


class Encoder(nnx.Module):
  """A stack of encoder layers."""

  def __init__(self, config: TransformerConfig, make_tables, *, rngs: nnx.Rngs):
    layers = [EncoderLayer(config, make_tables(), rngs=rngs) for _ in range(config.num_layers)]
    self.layers = nnx.List(layers)
    self.norm = _last_norm(config, rngs)

  def __call__(self, x, mask, rngs=None):
    for layer in self.layers:
      x = layer(x, mask, rngs)
    return self.norm(x)


class DecoderLayer(nnx.Module):
  """Causal self-attention, attention to the memory (without positions), and feed-forward."""

  def __init__(self, config: TransformerConfig, tables, *, rngs: nnx.Rngs):
    self.self_attention = _attention(config, tables, rngs)
    self.cross_attention = _attention(config, None, rngs)
    self.feed_forward = _feed_forward(config, rngs)
    self.residuals = nnx.List([_residual(config, rngs) for _ in range(3)])

  def __call__(self, x, memory, mask, rngs=None):
    around = self.residuals[0]
    y = self.self_attention(around.before(x), is_causal=True, rngs=rngs)
    x = around.after(x, y, rngs)
    return self._read(x, self.cross_attention.keys_values(memory), mask, rngs)

  def decode(self, x, cache: KVCache, positions, keys_values, mask):
    around = self.residuals[0]
    y, cache = self.self_attention.decode(around.before(x), cache, positions)
    return self._read(around.after(x, y), keys_values, mask), cache

  def _read(self, x, keys_values, mask, rngs=None):
    """What follows self-attention, in training as in decoding."""
    _, around_cross_attention, around_feed_forward = self.residuals
    x_normed = around_cross_attention.before(x)
    y = self.cross_attention.attend(x_normed, *keys_values, mask=mask, rngs=rngs)
    x = around_cross_attention.after(x, y, rngs)
    y = self.feed_forward(around_feed_forward.before(x), rngs)
    return around_feed_forward.after(x, y, rngs)


class Decoder(nnx.Module):
  """A stack of decoder layers."""

  def __init__(self, config: TransformerConfig, make_tables, *, rngs: nnx.Rngs):
    layers = [DecoderLayer(config, make_tables(), rngs=rngs) for _ in range(config.num_layers)]
    self.layers = nnx.List(layers)
    self.norm = _last_norm(config, rngs)

  def __call__(self, x, memory, mask, rngs=None):
    for layer in self.layers:
      x = layer(x, memory, mask, rngs)
    return self.norm(x)

  def keys_values(self, memory):
    """Each layer's projection of the memory."""
    return tuple(layer.cross_attention.keys_values(memory) for layer in self.layers)

  def decode(self, x, caches: tuple[KVCache, ...], positions, memory: Memory):
    new = []
    for layer, cache, keys_values in zip(self.layers, caches, memory.keys_values, strict=True):
      x, cache = layer.decode(x, cache, positions, keys_values, memory.mask)
      new.append(cache)
    return self.norm(x), tuple(new)


def _padding_mask(tokens: Int[Array, "B S"]) -> Bool[Array, "B 1 1 S"]:
  return (tokens != PAD)[:, None, None]


def _table_maker(config: TransformerConfig, rngs: nnx.Rngs):
  """What gives each layer of a stack its tables: new ones, always the same, or None."""
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


def _attention(config: TransformerConfig, tables, rngs: nnx.Rngs) -> MultiHeadAttention:
  return MultiHeadAttention(
    config.width,
    config.num_heads,
    tables=tables,
    dropout_rate=config.attention_dropout_rate,
    implementation=config.implementation,
    dtype=config.dtype,
    rngs=rngs,
  )


def _feed_forward(config: TransformerConfig, rngs: nnx.Rngs) -> FeedForward:
  return FeedForward(
    config.width,
    config.feed_forward,
    dropout_rate=config.feed_forward_dropout_rate,
    dtype=config.dtype,
    rngs=rngs,
  )


def _residual(config: TransformerConfig, rngs: nnx.Rngs) -> Residual:
  return Residual(
    config.width, norm=config.norm, dropout_rate=config.dropout_rate, dtype=config.dtype, rngs=rngs
  )


def _last_norm(config: TransformerConfig, rngs: nnx.Rngs):
  """Pre-norm leaves the sum of the residuals unscaled: a stack ends in a norm."""
  if config.norm == "post":
    return _identity
  return nnx.LayerNorm(config.width, dtype=config.dtype, rngs=rngs)


def _identity(x):
  return x
