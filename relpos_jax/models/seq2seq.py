"""The encoder-decoder Transformer of Vaswani et al. 2017, with relative positions."""

import dataclasses
import functools
import itertools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from relpos_jax.models.layers import (
  PAD,
  Cache,
  Embedding,
  LayersConfig,
  Memory,
  make_stack,
)
from relpos_jax.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class TransformerConfig(LayersConfig):
  """Holds the options of the model, in addition to the options of its layers.

  Attributes:
    source_vocab_size, target_vocab_size: V of source and target; equal if they share
      embeddings.
    share_embeddings: whether source, target and softmax share one matrix, instead of
      three.
    positions_in: which stacks have `positions`: "all", "encoder" or "decoder".
  """

  source_vocab_size: int
  target_vocab_size: int
  share_embeddings: bool = True
  positions_in: Literal["all", "encoder", "decoder"] = "all"

  def __post_init__(self):
    super().__post_init__()
    if self.share_embeddings and self.source_vocab_size != self.target_vocab_size:
      sizes = f"{self.source_vocab_size} and {self.target_vocab_size}"
      raise ValueError(f"share_embeddings with vocabularies of {sizes}; want one size")


class Transformer(nnx.Module):
  """Maps source and target tokens to logits of the next target token.

  Token 0 is padding, at the end of a source or a target. It has no effect on other
  tokens and no gradient. Elsewhere in a source it is masked, but takes a position.
  Dropout is applied if `rngs` are given.

  >>> import jax
  >>> import jax.numpy as jnp
  >>> config = TransformerConfig(50, 50, num_layers=1, width=16, num_heads=2)
  >>> model = nnx.jit(lambda: Transformer(config, rngs=nnx.Rngs(0)))()
  >>> source, target_input = jnp.ones((2, 7), int), jnp.ones((2, 5), int)
  >>> jax.jit(model.__call__)(source, target_input).shape
  (2, 5, 50)

  Decoding computes the same logits one token at a time:

  >>> memories = jax.jit(model.encode_memory)(source)
  >>> cache = model.init_cache(2, num_slots=5)
  >>> logits, cache = jax.jit(model.decode)(target_input[:, :1], cache, memories)
  >>> logits.shape
  (2, 1, 50)
  """

  def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
    without = dataclasses.replace(config, positions="none")
    encoder = without if config.positions_in == "decoder" else config
    decoder = without if config.positions_in == "encoder" else config
    self.source_embedding = Embedding(encoder, config.source_vocab_size, rngs=rngs)
    table = self.source_embedding.table if config.share_embeddings else None
    make = functools.partial(
      Embedding, decoder, config.target_vocab_size, table, rngs=rngs
    )
    self.target_embedding, self.softmax = make(), make()
    self.encoder = _Stack(encoder, is_decoder=False, rngs=rngs)
    self.decoder = _Stack(decoder, is_decoder=True, rngs=rngs)

  def __call__(
    self,
    source: Int[Array, "B S"],
    target_input: Int[Array, "B T"],
    rngs: nnx.Rngs | None = None,
  ) -> Float[Array, "B T V"]:
    """Returns float32 logits of the next token after each of `target_input`."""
    memories = self.encode_memory(source, rngs)
    x = self.target_embedding(target_input, rngs=rngs)
    x = self.decoder(x, rngs, memories, is_causal=True)
    return self.softmax.logits(x)

  def encode(
    self, source: Int[Array, "B S"], rngs: nnx.Rngs | None = None
  ) -> Float[Array, "B S D"]:
    """Returns the encoder's output, one vector per source token."""
    x = self.source_embedding(source, rngs=rngs)
    mask = (source != PAD)[:, None, None]
    return self.encoder(x, rngs, mask=mask)

  def encode_memory(
    self, source: Int[Array, "B S"], rngs: nnx.Rngs | None = None
  ) -> tuple[Memory, ...]:
    """Encodes a source once, to decode any number of tokens.

    Returns the encoder keys and values for each layer of the decoder, and their mask.
    """
    x = self.encode(source, rngs)
    mask = (source != PAD)[:, None, None]
    memories = []
    for layer in self.decoder.layers:
      key, value = layer.cross_attention.keys_values(x)
      memories.append(Memory(key, value, mask))
    return tuple(memories)

  def empty_memory(self, source: Int[Array, "B S"]) -> tuple[Memory, ...]:
    """Returns zeros with the shapes of `encode_memory`, without running the encoder."""
    shapes = jax.eval_shape(self.encode_memory, source)
    return jax.tree.map(jnp.zeros_like, shapes)

  def init_cache(
    self, batch_size: int, num_slots: int, beam_size: int | None = None
  ) -> Cache:
    """Returns an empty cache for `num_slots` tokens, padding included.

    With `beam_size` W, it has W slots for each of these tokens, one per hypothesis.
    """
    return Cache.empty(self.decoder.layers, batch_size, num_slots, beam_size)

  def decode(
    self, tokens: Int[Array, "B M"], cache: Cache, memories: tuple[Memory, ...]
  ) -> tuple[Float[Array, "B M V"], Cache]:
    """Reads M more target tokens; returns the logits after each, and the new cache.

    Padding may be anywhere among the tokens. With a cache for beam search, M is W: the
    tokens are the W alternatives for the next position, one of each hypothesis.
    """
    positions = cache.positions(tokens)
    x = self.target_embedding(tokens, positions=positions)
    x, cache = cache.read(self.decoder.layers, x, positions, memories)
    x = self.decoder.norm(x)
    return self.softmax.logits(x), cache


class _Stack(nnx.Module):
  """Applies the layers of the encoder or decoder, and the norm at the end."""

  def __init__(self, config: TransformerConfig, *, is_decoder: bool, rngs: nnx.Rngs):
    self.layers, self.norm = make_stack(
      config, has_cross_attention=is_decoder, is_causal=is_decoder, rngs=rngs
    )

  def __call__(self, x, rngs, memories: tuple[Memory, ...] = (), **options):
    """Applies the layers; `options` go to self-attention: mask, is_causal."""
    for layer, memory in itertools.zip_longest(self.layers, memories):
      x = layer(x, rngs, memory, **options)
    return self.norm(x)
