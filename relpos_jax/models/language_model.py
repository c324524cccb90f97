"""A decoder-only Transformer, such as Music Transformer (Huang et al. 2018)."""

import dataclasses

from flax import nnx

from relpos_jax.models.layers import Cache, Embedding, LayersConfig, make_stack
from relpos_jax.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig(LayersConfig):
  """Holds the options of the model and its layers; `vocab_size` is V."""

  vocab_size: int


class LanguageModel(nnx.Module):
  """Maps tokens to logits of the next token, with one matrix for embedding and softmax.

  Token 0 is padding, at the end of a sequence. Dropout is applied if `rngs` are given.
  For Music Transformer, set `positions="both", relative_values=False, beyond="zero"`.

  >>> import jax.numpy as jnp
  >>> config = LanguageModelConfig(50, num_layers=1, width=16, num_heads=2)
  >>> model = nnx.jit(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))()
  >>> tokens = jnp.ones((2, 5), int)
  >>> nnx.jit(lambda model: model(tokens))(model).shape
  (2, 5, 50)

  `decode` computes the same logits one token at a time, with a cache from `init_cache`.
  """

  def __init__(self, config: LanguageModelConfig, *, rngs: nnx.Rngs):
    self.softmax = Embedding(config, config.vocab_size, rngs=rngs)
    self.layers, self.norm = make_stack(config, rngs=rngs)

  def __call__(
    self, tokens: Int[Array, "B T"], rngs: nnx.Rngs | None = None
  ) -> Float[Array, "B T V"]:
    """Returns float32 logits of the next token after each of `tokens`."""
    x = self.softmax(tokens, rngs=rngs)
    for layer in self.layers:
      x = layer(x, rngs, is_causal=True)
    return self.softmax.logits(self.norm(x))

  def init_cache(self, batch_size: int, num_slots: int) -> Cache:
    """Returns an empty cache for `num_slots` tokens, padding included."""
    return Cache.empty(self.layers, batch_size, num_slots)

  def decode(
    self, tokens: Int[Array, "B M"], cache: Cache
  ) -> tuple[Float[Array, "B M V"], Cache]:
    """Reads M more tokens; returns the logits after each, and the new cache.

    Padding may be anywhere among the tokens.
    """
    positions = cache.positions(tokens)
    x = self.softmax(tokens, positions=positions)
    x, cache = cache.read(self.layers, x, positions)
    return self.softmax.logits(self.norm(x)), cache
