"""Feed-forward layers, residual connections, dropout and sharding of activations."""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from relpos_jax.attention import dropout
from relpos_jax.attention.partitioned import axes_in_context
from relpos_jax.nn.attention import kernel_init
from relpos_jax.typing import Array, Float


class FeedForward(nnx.Module):
  """Applies two linear layers, with a ReLU and dropout between them.

  Vaswani et al. 2017, section 3.3.

  >>> FeedForward(8, 32, rngs=nnx.Rngs(0))(jnp.ones((2, 8))).shape
  (2, 8)
  """

  def __init__(
    self,
    width: int,
    hidden_width: int,
    *,
    dropout_rate: float = 0.0,
    dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    linear = functools.partial(
      nnx.Linear, kernel_init=kernel_init, dtype=dtype, rngs=rngs
    )
    self.hidden = linear(width, hidden_width)
    self.dropout_rate = dropout_rate
    self.out = linear(hidden_width, width)

  def __call__(
    self, x: Float[Array, "*B D"], rngs: nnx.Rngs | None = None
  ) -> Float[Array, "*B D"]:
    hidden = jax.nn.relu(self.hidden(x))
    return self.out(drop(hidden, self.dropout_rate, rngs))


class Residual(nnx.Module):
  """Adds a residual connection, layer norm and dropout around a sub-layer f.

  Pre-norm: x + dropout(f(norm(x))). Post-norm: norm(x + dropout(f(x))). Call `before`,
  then f, then `after`, so that f may have more arguments and results:

  >>> residual = Residual(8, norm="pre", rngs=nnx.Rngs(0))
  >>> x = jnp.ones((2, 8))
  >>> residual.after(x, jnp.tanh(residual.before(x))).shape
  (2, 8)
  """

  def __init__(
    self,
    width: int,
    *,
    norm: Literal["pre", "post"],
    dropout_rate: float = 0.0,
    dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
    self.dropout_rate = dropout_rate
    self.pre_norm = norm == "pre"

  def before(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """Normalizes x, the input of a sub-layer, if layers are pre-norm."""
    return self.norm(x) if self.pre_norm else x

  def after(
    self, x: Float[Array, "*B D"], y: Float[Array, "*B D"], rngs: nnx.Rngs | None = None
  ) -> Float[Array, "*B D"]:
    """Adds the sub-layer's output `y` to its input `x`."""
    x = x + drop(shard_leading(y, "BT"), self.dropout_rate, rngs)
    return x if self.pre_norm else self.norm(x)


def drop(
  x: Float[Array, "*B D"], rate: float, rngs: nnx.Rngs | None
) -> Float[Array, "*B D"]:
  """Zeroes each number with probability `rate`, and divides the others by 1 - rate.

  Without `rngs` it returns x. A hash of a number's index decides whether to drop it,
  since on a CPU the random bits of flax's dropout take 8 to 22% of a training step.
  """
  if rngs is None or rate == 0:
    return x
  dropout.check_rate(rate)
  *batch, _ = x.shape
  bits = jax.random.bits(rngs.dropout(), dtype="uint32")
  seed = jax.lax.bitcast_convert_type(bits, jnp.int32)
  rows = jnp.arange(math.prod(batch)).reshape(*batch, 1)
  columns = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
  keeps = dropout.keep(seed, rows, columns, rate)
  return jnp.where(keeps, x / (1 - rate), 0)


def shard_leading(x: Array, letters: str) -> Array:
  """Shards the leading axes of x, named by `letters`, over the mesh in context.

  Layers call it on activations [B, T, D] ("BT") and embedding tables [V, D] ("N").
  Without it, the compiler might move activations between devices instead of parameters,
  which are sharded over D. An axis that the mesh does not divide is replicated. Returns
  x unchanged if there is no mesh in context, or if `letters` name all axes of x.
  """
  shards = axes_in_context()
  if not any(shards.values()) or x.ndim <= len(letters):
    return x
  mesh = jax.sharding.get_abstract_mesh()
  spec = []
  for letter, size in zip(letters, x.shape, strict=False):
    names = shards[letter]
    num_shards = math.prod(mesh.shape[name] for name in names)
    is_sharded = names and size % num_shards == 0
    spec.append(names if is_sharded else None)
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))
