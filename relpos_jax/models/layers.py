"""Parts that the models share: the config of layers, embeddings, layers, caches."""

import dataclasses
import functools
import inspect
import itertools
from typing import Any, Literal, NamedTuple, get_args, get_origin

import jax
import jax.numpy as jnp
from flax import nnx

from relpos_jax.nn.attention import KVCache, MultiHeadAttention
from relpos_jax.nn.feed_forward import FeedForward, Residual, drop, shard_leading
from relpos_jax.nn.positions import Positions, RelativePositionTables, sinusoids
from relpos_jax.nn.schemes import SCHEMES, PositionsName
from relpos_jax.typing import Array, Bool, Float, Int, PyTree

PAD = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayersConfig:
  """Holds the options of the layers. The defaults are the paper's base model.

  Attributes:
    num_layers: the number of layers in each stack.
    width: D.
    num_heads: N, the number of heads, of width D / N.
    feed_forward: the hidden width of the feed-forward layers.
    positions: "relative" (tables in every self-attention), "sinusoidal" (added to
      embeddings), "both" or "none". Or one of `relpos_jax.nn.schemes` in every
      self-attention: "t5", "alibi" (for causal models), "rotary", "xl"
      (Transformer-XL), "content" (Inkling) or "deberta". Or a subclass of `Positions`.
      Its `__init__` may have any of the arguments width, num_heads, head_width,
      max_distance, left, bidirectional and rngs.
    max_distance: k, the clipping distance; 16 is Shaw's. T5 has 128, and
      Transformer-XL does not clip. It has no effect on sinusoids, "alibi" and "rotary".
    left: the clipping distance on the left, if it differs from k. Then tables have left
      + 1 + k rows. Causal models need no rows on the right, so k may be 0.
    tables_per_head: whether each head has its own tables `[2k+1, H]`, as in the base
      model, or all heads share them, as in the big model.
    tables_per_layer: whether each layer has its own tables, or the layers of a stack
      share them.
    relative_keys, relative_values: whether to add vectors to keys, and to values (the
      paper's Table 3).
    beyond: "clip" or "zero" beyond distance k.
    norm: "pre", with a final norm on each stack (Tensor2Tensor from October 2017), or
      "post" (Tensor2Tensor before).
    embedding_dropout_rate: dropout of embeddings.
    attention_dropout_rate: dropout of attention weights.
    dropout_rate: dropout of the outputs of sub-layers.
    feed_forward_dropout_rate: dropout after the ReLU.
    dtype: the dtype of the computation; parameters are float32.
    implementation: name for the attention operator; None chooses the fastest.

  Raises ValueError for unknown values, and for options of tables with a scheme that
  lacks them. With "sinusoidal" and "none" these options have no effect, so that a sweep
  may change the positions alone.
  """

  num_layers: int = 6
  width: int = 512
  num_heads: int = 8
  feed_forward: int = 1024
  positions: PositionsName | type[Positions] = "relative"  # pyright: ignore
  max_distance: int = 16
  left: int | None = None
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
    for field in dataclasses.fields(self):
      value, choices = getattr(self, field.name), get_args(field.type)
      if get_origin(field.type) is Literal and value not in choices:
        raise ValueError(f"{field.name} is {value!r}; want one of {', '.join(choices)}")
    is_class = isinstance(self.positions, type) and issubclass(
      self.positions, Positions
    )
    if not is_class and self.positions not in SCHEMES:
      choices = f"{', '.join(SCHEMES)}, or a subclass of Positions"
      raise ValueError(f"positions is {self.positions!r}; want one of {choices}")
    if self._positions_class not in (None, RelativePositionTables):
      self._check_options_of(self._positions_class)

  @property
  def _positions_class(self) -> type[Positions] | None:
    """Returns the class of positions in the layers; None if they have none."""
    return SCHEMES.get(self.positions, self.positions)

  def _check_options_of(self, kind: type[Positions]) -> None:
    """Raises ValueError if an option is set that these positions do not have."""
    foreign = ["relative_keys", "relative_values", "beyond", "tables_per_head"]
    if "left" not in _signature(kind).parameters:
      foreign.append("left")
    for name in foreign:
      value = getattr(self, name)
      default = getattr(LayersConfig, name)
      if value != default:
        raise ValueError(
          f"{name} is {value!r}, an option that positions {self.positions!r} do not "
          f"have; want the default, {default!r}"
        )


def _signature(kind: type[Positions]) -> inspect.Signature:
  # The signature of an NNX class itself is (*args, **kwargs).
  return inspect.signature(kind.__init__)


class Memory(NamedTuple):
  """Holds the encoder keys and values for one decoder layer, and the padding mask."""

  key: Float[Array, "B S N H"]
  value: Float[Array, "B S N H"]
  mask: Bool[Array, "B 1 1 S"]


class Cache(NamedTuple):
  """Holds the caches of all layers, and the next position in each row of the batch.

  In beam search, all hypotheses of a sentence share one row. Each step reads the W
  candidates for the next token into W slots, all at the same position. `beam_mask` says
  which slots have the tokens of each hypothesis, so that nothing is copied when
  hypotheses branch.
  """

  layers: tuple[KVCache, ...]
  next_position: Int[Array, " B"]
  beam_mask: Bool[Array, "B W S"] | None = None

  @classmethod
  def empty(
    cls, layers, batch_size: int, num_slots: int, beam_size: int | None = None
  ) -> "Cache":
    """Returns an empty cache for `num_slots` tokens, padding included.

    With `beam_size` W, it has W slots for each of these tokens, one per hypothesis.
    """
    beam_mask = None
    if beam_size is not None:
      num_slots *= beam_size
      beam_mask = jnp.zeros((batch_size, beam_size, num_slots), bool)
    caches = tuple(
      layer.self_attention.init_cache(batch_size, num_slots) for layer in layers
    )
    return cls(caches, jnp.zeros(batch_size, jnp.int32), beam_mask)

  def positions(self, tokens: Int[Array, "B M"]) -> Int[Array, "B M"]:
    """Returns the positions of the next tokens.

    In beam search the tokens are alternatives, all at the next position. Padding has
    position -1, wherever it is: it takes a slot, but no position.
    """
    is_token = tokens != PAD
    positions = self.next_position[:, None]
    if self.beam_mask is None:
      positions += jnp.cumsum(is_token, axis=1, dtype=jnp.int32) - 1
    return jnp.where(is_token, positions, -1)

  def read(
    self, layers, x: Array, positions: Array, memories: tuple[Memory, ...] = ()
  ) -> tuple[Float[Array, "B M D"], "Cache"]:
    """Applies layers to M more tokens at positions [B, M].

    `x` are the embedded tokens, and `memories` the encoder keys and values for each
    layer. Returns the output of the last layer, and the new cache.
    """
    beam_mask = mask = None
    if self.beam_mask is not None:
      _, beam_size, num_slots = self.beam_mask.shape
      own_slot = self.layers[0].length[:, None] + jnp.arange(beam_size)
      beam_mask = self.beam_mask | jax.nn.one_hot(own_slot, num_slots, dtype=bool)
      mask = beam_mask[:, None]
    caches = []
    parts = itertools.zip_longest(layers, self.layers, memories)
    for layer, cache, memory in parts:
      x, cache = layer.decode(x, cache, positions, memory, mask)
      caches.append(cache)
    last = positions.max(axis=1, initial=-1)
    next_position = jnp.maximum(self.next_position, last + 1)
    return x, Cache(tuple(caches), next_position, beam_mask)

  def reorder(self, hypotheses: Int[Array, "B W"]) -> "Cache":
    """Returns the cache for new hypotheses: this is `reorder` for `beam_search`.

    In sentence b, the new hypothesis w extends the old hypothesis `hypotheses[b, w]`.
    """
    beams = hypotheses[:, :, None]
    beam_mask = jnp.take_along_axis(self.beam_mask, beams, axis=1)  # pyright: ignore
    return self._replace(beam_mask=beam_mask)


class Embedding(nnx.Module):
  """Embeds tokens, and maps vectors to logits by the same matrix.

  The matrix is drawn from N(0, 1/D), and embeddings are multiplied by sqrt(D). If the
  config says so, sinusoids are added.
  """

  def __init__(
    self,
    config: LayersConfig,
    vocab_size: int,
    table: nnx.Param | None = None,
    *,
    rngs: nnx.Rngs,
  ):
    init = jax.nn.initializers.normal(config.width**-0.5)
    shape = vocab_size, config.width
    self.table = nnx.Param(init(rngs.params(), shape)) if table is None else table
    self.config = config

  def __call__(
    self,
    tokens: Int[Array, "B T"],
    *,
    positions: Array | None = None,
    rngs: nnx.Rngs | None = None,
  ) -> Float[Array, "B T D"]:
    """Embeds tokens at `positions`, by default 0, 1, 2, ..."""
    config = self.config
    table = shard_leading(self.table[...], "N")
    x = jnp.take(table, tokens, axis=0, mode="clip")
    x = shard_leading(x * config.width**0.5, "BT")
    if config.positions in ("sinusoidal", "both"):
      if positions is None:
        positions = jnp.arange(tokens.shape[1])
      x += sinusoids(positions, config.width)
    return drop(x.astype(config.dtype), config.embedding_dropout_rate, rngs)

  def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Computes float32 logits, as products with the embeddings of all tokens."""
    table = self.table[...].astype(self.config.dtype)
    return jnp.einsum("BTD,VD->BTV", x, table, preferred_element_type=jnp.float32)


class Layer(nnx.Module):
  """Applies self-attention, optional cross-attention and a feed-forward layer.

  Each of them has a residual connection.
  """

  def __init__(
    self,
    config: LayersConfig,
    positions: Positions | None = None,
    *,
    has_cross_attention: bool = False,
    rngs: nnx.Rngs,
  ):
    attention = functools.partial(
      MultiHeadAttention,
      config.width,
      config.num_heads,
      dropout_rate=config.attention_dropout_rate,
      implementation=config.implementation,
      dtype=config.dtype,
      rngs=rngs,
    )
    self.self_attention = attention(positions=positions)
    self.cross_attention = attention() if has_cross_attention else None
    self.feed_forward = FeedForward(
      config.width,
      config.feed_forward,
      dropout_rate=config.feed_forward_dropout_rate,
      dtype=config.dtype,
      rngs=rngs,
    )
    self.residuals = nnx.List()
    for _ in range(3 if has_cross_attention else 2):
      residual = Residual(
        config.width,
        norm=config.norm,
        dropout_rate=config.dropout_rate,
        dtype=config.dtype,
        rngs=rngs,
      )
      self.residuals.append(residual)

  def __call__(
    self, x, rngs: nnx.Rngs | None = None, memory: Memory | None = None, **options
  ) -> Float[Array, "B T D"]:
    """Applies the layer; `options` go to self-attention: mask, is_causal, ..."""
    y = self.self_attention(self.residuals[0].before(x), rngs=rngs, **options)
    return self._after_self_attention(x, y, rngs, memory)

  def decode(
    self, x, cache: KVCache, positions, memory: Memory | None = None, mask=None
  ):
    """Applies the layer to more tokens, and returns the output and the cache."""
    inputs = self.residuals[0].before(x)
    y, new_cache = self.self_attention.decode(inputs, cache, positions, mask)
    return self._after_self_attention(x, y, None, memory), new_cache

  def _after_self_attention(self, x, y, rngs: nnx.Rngs | None, memory: Memory | None):
    x = self.residuals[0].after(x, y, rngs)
    if memory is not None and self.cross_attention is not None:
      around = self.residuals[1]
      key, value, mask = memory
      y = self.cross_attention.attend(
        around.before(x), key, value, mask=mask, rngs=rngs
      )
      x = around.after(x, y, rngs)
    around = self.residuals[-1]
    return around.after(x, self.feed_forward(around.before(x), rngs), rngs)


def make_positions(
  config: LayersConfig, *, is_causal: bool, rngs: nnx.Rngs
) -> Positions | None:
  """Creates the positions for a layer's self-attention; None if it has none."""
  kind = config._positions_class
  if kind is None or not (config.relative_keys or config.relative_values):
    return None
  options: dict[str, Any] = dict(
    width=config.width,
    num_heads=config.num_heads if config.tables_per_head else None,
    head_width=config.width // config.num_heads,
    max_distance=config.max_distance,
    left=config.left,
    bidirectional=not is_causal,
    rngs=rngs,
  )
  if kind is RelativePositionTables:
    options |= dict(
      keys=config.relative_keys,
      values=config.relative_values,
      beyond=config.beyond,
      dtype=config.dtype,
    )
  signature = _signature(kind)
  chosen = {name: options[name] for name in signature.parameters if name in options}
  try:
    signature.bind(None, **chosen)
  except TypeError as error:
    wanted = f"a default, or a name among {', '.join(options)}"
    raise ValueError(f"{kind.__name__}: {error}; want {wanted}") from error
  return kind(**chosen)


def make_stack(
  config: LayersConfig,
  *,
  has_cross_attention: bool = False,
  is_causal: bool = True,
  rngs: nnx.Rngs,
):
  """Creates the layers of a stack with their positions, and the last norm.

  If `config.tables_per_layer`, each layer has its own positions. Otherwise all layers
  share one module.
  """
  layers = nnx.List()
  positions = None
  for _ in range(config.num_layers):
    if positions is None or config.tables_per_layer:
      positions = make_positions(config, is_causal=is_causal, rngs=rngs)
    layers.append(
      Layer(config, positions, has_cross_attention=has_cross_attention, rngs=rngs)
    )
  return layers, last_norm(config, rngs)


def last_norm(config: LayersConfig, rngs: nnx.Rngs):
  """Creates the norm at the end of a stack: a layer norm, or the identity.

  The output of pre-norm layers is a sum without a norm, so it needs one. Post-norm
  layers already end with a norm, so this function returns `nnx.identity` for them.
  """
  if config.norm == "post":
    return nnx.identity
  return nnx.LayerNorm(config.width, dtype=config.dtype, rngs=rngs)


def decoding_model(graphdef: nnx.GraphDef, params: PyTree) -> nnx.Module:
  """Merges a model for decoding, with None as the implementation of attention.

  The implementation in the config is for training. Some implementations, such as
  "skew", take no positions, and a decoder with a cache gives them.
  """
  model = nnx.merge(graphdef, params)
  model.set_attributes(implementation=None)
  return model
