"""Defines the encoder of Ruoss et al. 2023, and position schemes not in relpos_jax."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.length_tasks.tasks import PAD, TaskBatch
from relpos_jax.attention.relations import FunctionBias, LinearBias
from relpos_jax.models.layers import Embedding, LayersConfig, make_stack
from relpos_jax.nn import Positions
from relpos_jax.typing import Float


@dataclasses.dataclass(frozen=True)
class TaskModelConfig(LayersConfig):
  """Holds the options of the model, in addition to the options of its layers.

  Attributes:
    num_symbols: V, the rows of the embedding: input symbols, the blank and padding.
    num_classes: C, the number of output symbols.
    random_positions: 0 for the positions 0, 1, 2, ... Otherwise the model takes the
      positions of the batch, which are drawn from 0 to this number - 1. All rows and
      layers share them. (The code of Ruoss et al. draws them anew in each layer, and
      for ALiBi and Transformer-XL it draws distances.)
    table_stddev: the standard deviation of Shaw's initial tables; 0 keeps the default
      initialisation.
  """

  num_symbols: int
  num_classes: int
  random_positions: int = 0
  table_stddev: float = 0.0


class TaskModel(nnx.Module):
  """Maps the tokens of a batch to logits of the classes, without a causal mask."""

  def __init__(self, config: TaskModelConfig, *, rngs: nnx.Rngs):
    # As in the authors' code. It is small compared to sinusoids, even after Embedding
    # has scaled it.
    init = jax.nn.initializers.truncated_normal(0.02)
    shape = config.num_symbols, config.width
    table = nnx.Param(init(rngs.params(), shape))
    self.config = config
    self.embedding = Embedding(config, config.num_symbols, table, rngs=rngs)
    self.layers, self.norm = make_stack(config, is_causal=False, rngs=rngs)
    self.classes = nnx.Linear(config.width, config.num_classes, rngs=rngs)
    if config.table_stddev:
      self._draw_tables(config.table_stddev, rngs)

  def _draw_tables(self, stddev: float, rngs: nnx.Rngs) -> None:
    for layer in self.layers:
      tables = layer.self_attention.tables
      for table in (tables.key, tables.value):
        table[...] = stddev * jax.random.normal(rngs.params(), table.shape)

  def __call__(
    self, batch: TaskBatch, rngs: nnx.Rngs | None = None
  ) -> Float[jax.Array, "B L C"]:
    options = dict(mask=(batch.tokens != PAD)[:, None, None])
    positions = None
    if self.config.random_positions:
      positions = batch.positions[0]  # rows share them: biases are computed once
      options |= dict(query_positions=positions, key_positions=positions)
    x = self.embedding(batch.tokens, positions=positions, rngs=rngs)
    for layer in self.layers:
      x = layer(x, rngs, **options)
    return self.classes(self.norm(x))


class Alibi(Positions):
  """Adds ALiBi's biases, but subtracts 0.5 from the distance of keys on the left.

  The code of Ruoss et al. does so with plain positions. Otherwise a model without a
  causal mask could not tell left from right.
  """

  def __init__(self, num_heads: int, *, rngs: nnx.Rngs | None = None):
    self.num_heads = num_heads

  def __call__(self) -> FunctionBias:
    return FunctionBias(_alibi, LinearBias.alibi(self.num_heads).slopes)


def _alibi(slopes, i, j, *_):
  return -slopes * (jnp.abs(j - i) - 0.5 * (j < i))


class Kerple(Positions):
  """Subtracts r1 log(1 + r2 |j - i|) from the logit of query i and key j.

  Each head learns r1 and r2, separately for keys on the left and on the right. Chi et
  al. 2022, equation 6, has only the left side: it is for causal attention. Initial
  values are drawn as in the authors' code, which learns r1 and r2. Here their
  logarithms are learned, so that both stay positive.
  """

  def __init__(self, num_heads: int, *, rngs: nnx.Rngs):
    shape = 2, num_heads  # left, right
    r1 = jax.random.uniform(rngs.params(), shape, minval=0.01, maxval=2.0)
    r2 = jax.random.uniform(rngs.params(), shape, minval=0.01, maxval=1.0)
    self.log_r1 = nnx.Param(jnp.log(r1))
    self.log_r2 = nnx.Param(jnp.log(r2))

  def __call__(self) -> FunctionBias:
    return FunctionBias(_kerple, (self.log_r1[...], self.log_r2[...]))


def _kerple(params, i, j, *_):
  log_r1, log_r2 = params
  left_r1, right_r1 = jnp.exp(log_r1)
  left_r2, right_r2 = jnp.exp(log_r2)
  is_left = j < i
  r1 = jnp.where(is_left, left_r1, right_r1)
  r2 = jnp.where(is_left, left_r2, right_r2)
  return -r1 * jnp.log1p(r2 * jnp.abs(j - i))


class Fire(Positions):
  """Adds FIRE's biases, which a small network computes (Li et al. 2024).

  The input of the network is the distance divided by the query's position, both after
  compression by a logarithm. FIRE is for causal attention. Here the distance keeps its
  sign. Initial values are drawn as in the paper's code.

  Args:
    max_distance: the initial threshold. Query positions below the threshold are
      replaced by it. As in that code, a learned factor multiplies it.
  """

  def __init__(self, num_heads: int, max_distance: int, *, rngs: nnx.Rngs):
    self.c = nnx.Param(jnp.array(0.1))
    self.max_distance = max_distance
    self.multiplier = nnx.Param(jnp.array(1.0))
    self.hidden = _draw(rngs, (32,), num_inputs=1)
    self.hidden_bias = _draw(rngs, (32,), num_inputs=1)
    self.out = _draw(rngs, (32, num_heads), num_inputs=32)

  def __call__(self) -> FunctionBias:
    params = dict(
      c=self.c[...],
      threshold=self.multiplier[...] * self.max_distance,
      hidden=self.hidden[...],
      hidden_bias=self.hidden_bias[...],
      out=self.out[...],
    )
    return FunctionBias(_fire, params)


def _draw(rngs: nnx.Rngs, shape: tuple[int, ...], num_inputs: int) -> nnx.Param:
  """Draws parameters as PyTorch's `Linear` does."""
  bound = num_inputs**-0.5
  values = jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound)
  return nnx.Param(values)


def _fire(params, i, j, *_):
  def compress(distance):
    return jnp.log1p(jnp.abs(params["c"]) * distance)

  distance = jnp.sign(j - i) * compress(jnp.abs(j - i))
  longest = jnp.maximum(jnp.abs(params["threshold"]), i)
  share = distance / (compress(longest) + 1e-6)  # never 0 / 0
  hidden = jax.nn.relu(share * params["hidden"] + params["hidden_bias"])
  return hidden @ params["out"]  # without a bias, which a softmax would cancel
