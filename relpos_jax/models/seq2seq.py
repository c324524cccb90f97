"""The encoder-decoder Transformer of Vaswani et al. 2017 with the positions of Shaw et al. 2018."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from relpos_jax.models.layers import (
  PAD,
  Cache,
  Embedding,
  LayersConfig,
  SelfAttentionLayer,
  last_norm,
  make_attention,
  make_feed_forward,
  make_residual,
  table_maker,
)
from relpos_jax.nn.cache import KVCache
from relpos_jax.typing import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class TransformerConfig(LayersConfig):
  """Options of the model, in addition to those of its layers.

  Attributes:
    source_vocab_size, target_vocab_size: V of each side; equal if embeddings are shared.
    share_embeddings: use one matrix for source, target and softmax, instead of three.

  Raises:
    ValueError: a value is not one of its choices, or two values exclude each other.
  """

  source_vocab_size: int
  target_vocab_size: int
  share_embeddings: bool = True

  def __post_init__(self):
    super().__post_init__()
    if self.share_embeddings and self.source_vocab_size != self.target_vocab_size:
      sizes = f"{self.source_vocab_size} and {self.target_vocab_size}"
      raise ValueError(f"share_embeddings with vocabularies of {sizes}; want one size")


class Memory(NamedTuple):
  """An encoded source for the decoder: keys and values of each layer, and the padding mask."""

  keys_values: tuple[tuple[Float[Array, "B S N H"], Float[Array, "B S N H"]], ...]
  mask: Bool[Array, "B 1 1 S"]


class Transformer(nnx.Module):
  """Maps source and target tokens to logits of the next target token.

  Token 0 is padding, anywhere in a source and at the end of a target: it has no effect on other
  tokens and no gradient. Dropout is applied if `rngs` are given.

  >>> import jax
  >>> config = TransformerConfig(50, 50, num_layers=1, width=16, num_heads=2)
  >>> model = nnx.jit(lambda: Transformer(config, rngs=nnx.Rngs(0)))()
  >>> source, target_input = jnp.ones((2, 7), int), jnp.ones((2, 5), int)
  >>> jax.jit(model.__call__)(source, target_input).shape
  (2, 5, 50)

  Decoding computes the same one token at a time:

  >>> memory, cache = jax.jit(model.encode_memory)(source), model.init_cache(2, num_slots=5)
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
    self.encoder = Encoder(config, table_maker(config, rngs), rngs=rngs)
    self.decoder = Decoder(config, table_maker(config, rngs), rngs=rngs)

  def __call__(
    self,
    source: Int[Array, "B S"],
    target_input: Int[Array, "B T"],
    rngs: nnx.Rngs | None = None,
  ) -> Float[Array, "B T V"]:
    """Returns float32 logits of the token after each of `target_input`."""
    mask = _padding_mask(source)
    memory = self.encoder(self.source_embedding(source, rngs=rngs), mask, rngs)
    x = self.target_embedding(target_input, rngs=rngs)
    return self.softmax.logits(self.decoder(x, memory, mask, rngs))

  def encode(self, source: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """Returns the encoder's output, one vector per source token."""
    return self.encoder(self.source_embedding(source), _padding_mask(source))

  def encode_memory(self, source: Int[Array, "B S"]) -> Memory:
    """Encodes a source once, for decoding many tokens."""
    return Memory(self.decoder.keys_values(self.encode(source)), _padding_mask(source))

  def init_cache(self, batch_size: int, num_slots: int) -> Cache:
    """Returns an empty cache for `num_slots` tokens, padding included."""
    return Cache.empty(self.decoder.layers, batch_size, num_slots)

  def decode(
    self, tokens: Int[Array, "B M"], cache: Cache, memory: Memory
  ) -> tuple[Float[Array, "B M V"], Cache]:
    """Reads M more target tokens and returns the logits after each.

    Padding, anywhere among them, takes a slot of the cache but no position.
    """
    positions, after = cache.next_positions(tokens)
    x = self.target_embedding(tokens, positions=jnp.maximum(positions, 0))
    x, layers = self.decoder.decode(x, cache.layers, positions, memory)
    return self.softmax.logits(x), Cache(layers, after)


class Encoder(nnx.Module):
  """A stack of self-attention layers over the source."""

  def __init__(self, config: TransformerConfig, make_tables, *, rngs: nnx.Rngs):
    make = lambda: SelfAttentionLayer(config, make_tables(), rngs=rngs)
    self.layers = nnx.List([make() for _ in range(config.num_layers)])
    self.norm = last_norm(config, rngs)

  def __call__(self, x, mask, rngs=None):
    for layer in self.layers:
      x = layer(x, rngs, mask=mask)
    return self.norm(x)


class DecoderLayer(nnx.Module):
  """Causal self-attention, cross-attention without positions, and a feed-forward layer."""

  def __init__(self, config: TransformerConfig, tables, *, rngs: nnx.Rngs):
    self.self_attention = make_attention(config, tables, rngs)
    self.cross_attention = make_attention(config, None, rngs)
    self.feed_forward = make_feed_forward(config, rngs)
    self.residuals = nnx.List([make_residual(config, rngs) for _ in range(3)])

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
    """Applies cross-attention and the feed-forward layer."""
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
    self.norm = last_norm(config, rngs)

  def __call__(self, x, memory, mask, rngs=None):
    for layer in self.layers:
      x = layer(x, memory, mask, rngs)
    return self.norm(x)

  def keys_values(self, memory):
    """Projects the memory to keys and values of each layer."""
    return tuple(layer.cross_attention.keys_values(memory) for layer in self.layers)

  def decode(self, x, caches: tuple[KVCache, ...], positions, memory: Memory):
    new = []
    for layer, cache, keys_values in zip(self.layers, caches, memory.keys_values, strict=True):
      x, cache = layer.decode(x, cache, positions, keys_values, memory.mask)
      new.append(cache)
    return self.norm(x), tuple(new)


def _padding_mask(tokens: Int[Array, "B S"]) -> Bool[Array, "B 1 1 S"]:
  return (tokens != PAD)[:, None, None]
