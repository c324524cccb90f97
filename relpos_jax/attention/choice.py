"""The choice of the implementation: what each supports, and which is the fastest."""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.attention import band, blocks, chunked, reference, ring, skew
from relpos_jax.attention.inputs import Inputs, gather_inputs, is_symbolic
from relpos_jax.attention.partitioned import (
  axes_of_keys,
  num_target_devices,
  of_arrays,
  target_device,
  target_platform,
)
from relpos_jax.attention.relations import RelativePositions
from relpos_jax.typing import Array

# Has a record for each call that is traced, at level DEBUG: the implementation and the
# reason, as arguments.
logger = logging.getLogger(__name__)


def _takes_every_call(inputs: Inputs) -> None:
  return None


class Implementation(NamedTuple):
  """A way to compute attention."""

  attention: Callable[[Inputs], Array | tuple[Array, Array]]
  # Returns why it cannot do the call, or None.
  unsupported: Callable[[Inputs], str | None] = _takes_every_call
  # The only platform that it compiles for; elsewhere it is interpreted.
  device: str | None = None

  def is_compiled(self) -> bool:
    """Returns whether it compiles for the platform at hand."""
    return self.device in (None, target_platform())


def _pallas_gpu(inputs: Inputs) -> Array:
  from relpos_jax.attention import pallas_gpu  # Pallas takes long to import

  return pallas_gpu.attention(inputs)


def _unsupported_by_pallas_gpu(inputs: Inputs) -> str | None:
  from relpos_jax.attention import pallas_gpu  # Pallas takes long to import

  return pallas_gpu.unsupported(inputs)


def _chunked(inputs: Inputs) -> Array | tuple[Array, Array]:
  """Computes attention by blocks: in a ring, by the band, or with any relations."""
  names, _ = axes_of_keys()
  if names:
    return ring.attention(inputs)
  if band.unsupported(inputs):
    return blocks.attention(inputs)
  return chunked.attention(inputs)


def _unsupported_by_chunked(inputs: Inputs) -> str | None:
  if is_symbolic(inputs.query, inputs.key):
    return "a dimension is symbolic; it needs numbers"
  names, _ = axes_of_keys()
  reason = ring.unsupported(inputs) if names else None
  return reason and f"mesh_axes shards the keys over {names}: {reason}"


# The names that `implementation=` takes.
IMPLEMENTATIONS: Mapping[str, Implementation] = {
  "reference": Implementation(reference.attention),
  "per_position": Implementation(reference.per_position),
  "skew": Implementation(skew.attention, skew.unsupported),
  "projected": Implementation(reference.projected),
  "chunked": Implementation(_chunked, _unsupported_by_chunked),
  "pallas_gpu": Implementation(_pallas_gpu, _unsupported_by_pallas_gpu, device="gpu"),
}

# `implementation=` does not take this name: users can call jax.nn themselves.
PLAIN = "jax.nn"


# A kernel is chosen where a page in results/ shows that it is right and faster on a kind
# of device. The lengths on CPUs are from times, forward and backward. Elsewhere little is
# timed, and the choice follows the compiler for TPUs: results/tpu_costs.md.
def _is_timed_on_gpu(inputs: Inputs) -> bool:
  """Returns whether a call is causal self-attention from 1,024 tokens on, in bfloat16,
  on one H200.

  Timed were heads of 64 numbers, without relations or with 18 rows of tables, at 1,024
  to 4,096 tokens. This allows one row for 16 tokens, and 1 GiB for the band.
  Forward and backward it takes 0.54 times as long as jax.nn without relations at 1,024
  tokens, and 0.40 times at 4,096. Without relations it takes 0.29 and 0.27 times as
  long: results/attention.md.
  """
  if target_device().device_kind != "NVIDIA H200" or num_target_devices() > 1:
    return False
  batch, length, heads, width = inputs.query.shape
  if (inputs.query.dtype, width) != (jnp.bfloat16, 64) or not inputs.is_causal:
    return False
  if any(type(relation) is not RelativePositions for relation in inputs.relations):
    return False
  low, high = band.distances(inputs)
  num_rows = high - low + 1
  band_bytes = 4 * batch * heads * length * num_rows
  is_long = length >= max(1024, 16 * num_rows)
  return is_long and inputs.key.shape[1] == length and band_bytes <= 2**30


def _num_pairs(inputs: Inputs) -> int:
  """Returns the number of weights, over all heads and sequences."""
  batch, num_queries, heads, _ = inputs.query.shape
  return batch * heads * num_queries * inputs.key.shape[1]


def _is_long(inputs: Inputs) -> bool:
  """Returns whether keys are many: 64 on a CPU (512 for few queries), else 1 GiB of
  weights.

  On a CPU, `chunked` is slower than `per_position` at 32 tokens, about as fast at 64,
  in a fifth of the memory, and faster from 128 on: results/attention.md. Without a
  band, which makes `chunked` twice as fast, keys are many from 16 MiB of weights on.

  Elsewhere `projected` moves the fewest bytes. It takes three times the weights in
  temporary memory: with 1 GiB of them, 3 of a v5e's 16 GB.
  """
  if target_platform() == "cpu":
    if band.unsupported(inputs):
      return _num_pairs(inputs) >= 2**22
    fewest_keys = 512 if reference.has_few_queries(inputs) else 64
    return inputs.key.shape[1] >= fewest_keys
  mesh = jax.sharding.get_abstract_mesh()
  axes = *mesh.auto_axes, *mesh.explicit_axes
  num_devices = math.prod(mesh.shape[axis] for axis in axes)
  return _num_pairs(inputs) >= 2**28 * num_devices


def _is_plain(inputs: Inputs) -> bool:
  """Returns whether jax.nn can do the call."""
  if inputs.relations or inputs.return_residual:
    return False
  lacking = inputs.dropout_seeds, inputs.soft_cap, inputs.sinks, inputs.silu_divisor
  if any(option is not None for option in lacking):
    return False
  if inputs.value.shape != inputs.key.shape:  # jax.nn takes no others
    return False
  # Compiled, jax.nn asks for a product of float16 that only GPUs have.
  return inputs.query.dtype != jnp.float16 or target_platform() == "gpu"


def _gathered_is_small(inputs: Inputs) -> bool:
  """Returns whether, on a CPU, fewer than 64 keys have gathered vectors no larger than
  weights.
  """
  if target_platform() != "cpu" or inputs.key.shape[1] >= 64:
    return False
  if [type(relation) for relation in inputs.relations] != [RelativePositions]:
    return False
  batch, _, heads, width = inputs.query.shape
  label_batch = max(len(inputs.query_positions), len(inputs.key_positions))
  table_heads = max(table.shape[1] for table in jax.tree.leaves(inputs.relations))
  return label_batch * table_heads * width <= batch * heads


class Choice(NamedTuple):
  """An implementation, and why it runs."""

  implementation: str
  reason: str


_PLAIN = Choice(
  PLAIN,
  "there are no relations (cross-attention has none), nor options that jax.nn lacks",
)


def choose(inputs: Inputs, implementation: str | None = None) -> Choice:
  """Returns the implementation that runs, with the reason, and logs both.

  Raises if the implementation that is asked for does not support the call.
  """
  if implementation is not None:
    _check(implementation, inputs)
    choice = Choice(implementation, "implementation= names it")
  elif axes_of_keys()[1] > 1:
    _check("chunked", inputs)  # the others would gather the keys
    choice = Choice("chunked", "mesh_axes shards the keys, and it passes them round")
  else:
    choice = _fastest(inputs)
  logger.debug("attention by %s, because %s", choice.implementation, choice.reason)
  return choice


def _fastest(inputs: Inputs) -> Choice:
  """Returns the choice for a call whose keys are not sharded."""
  if is_symbolic(inputs.query, inputs.key):
    if _is_plain(inputs):
      return _PLAIN
    return Choice("projected", "a dimension is symbolic")
  if _is_timed_on_gpu(inputs) and not _unsupported_by_pallas_gpu(inputs):
    reason = "on this GPU it is faster than jax.nn without relations and than chunked"
    return Choice("pallas_gpu", reason)
  if reference.has_few_queries(inputs):
    if _is_long(inputs):
      return Choice("chunked", "queries are few and keys are many, on a CPU")
    # jax.nn would transpose the keys and the values.
    return Choice("projected", "queries are few, on a CPU")
  if not inputs.relations:
    return _fastest_without_relations(inputs)
  if _gathered_is_small(inputs):
    reason = "keys are below 64, and it gathers no more numbers than there are weights"
    return Choice("per_position", reason)
  if _is_long(inputs):
    return Choice("chunked", "keys are many, and it does not store their weights")
  return Choice("projected", "weights fit into memory, and it gathers no vectors")


def _fastest_without_relations(inputs: Inputs) -> Choice:
  # Forward and backward, on a CPU, chunked takes 0.66 times as long as jax.nn at 512
  # tokens (causal: 0.48), and a seventh of the memory: results/attention.md. With a
  # bias it takes three quarters to a tenth of the memory from this number of pairs on.
  is_long = _is_long(inputs)
  if is_long and _num_pairs(inputs) >= 2**20:
    reason = (
      "there are no relations but many pairs, and it does not store their weights"
    )
    return Choice("chunked", reason)
  if _is_plain(inputs):
    return _PLAIN
  if is_long:
    return Choice("chunked", "keys are many, and it does not store their weights")
  return Choice("reference", "there are no relations")


def _check(name: str, inputs: Inputs) -> None:
  """Raises an error if there is no such implementation, or it lacks the call."""
  if name not in IMPLEMENTATIONS:
    wanted = f"None, which chooses, or one of {', '.join(IMPLEMENTATIONS)}"
    if name in ("xla", "cudnn"):
      wanted += ". It is a name of jax.nn: leave implementation out"
    raise ValueError(f"implementation is {name!r}; want {wanted}")
  reason = IMPLEMENTATIONS[name].unsupported(inputs)
  if reason:
    raise NotImplementedError(f"implementation {name!r} cannot do this call: {reason}")


@jax.tree_util.register_static  # so that a traced function returns it
@dataclasses.dataclass(frozen=True, eq=False)
class Explanation:
  """The result of `explain`; its string has a line for each implementation."""

  implementation: str  # "jax.nn" is `jax.nn.dot_product_attention`
  reasons: dict[str, str]  # by name, why it would run or would not

  def __str__(self) -> str:
    return "\n".join(f"{name}: {reason}" for name, reason in self.reasons.items())


def explain(
  *arrays: Any, implementation: str | None = None, **options: Any
) -> Explanation:
  """Explains which implementation `dot_product_attention` would run, and why not the
  others.

  Takes its arguments and raises its errors; arrays may be `jax.ShapeDtypeStruct`s.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import RelativePositions
  >>> q = jax.ShapeDtypeStruct((32, 16, 4, 32), jnp.float32)
  >>> table = jax.ShapeDtypeStruct((33, 32), jnp.float32)
  >>> relations = RelativePositions(table, table)
  >>> print(explain(q, q, q, relations=relations, query_positions=jnp.arange(16)))
  per_position: chosen, keys are below 64, and it gathers no more numbers than there are weights
  reference: can do it, but per_position is preferred
  skew: positions are given; if they are consecutive, give query_offset instead
  projected: can do it, but per_position is preferred
  chunked: can do it, but per_position is preferred
  pallas_gpu: positions or query_offset are given; it needs 0, 1, 2, ...
  """

  def describe(arrays, options):
    return _describe(gather_inputs(*arrays, **options), implementation)

  arguments = arrays, options
  of_shapes, shapes = of_arrays(describe, arguments, lambda x: hasattr(x, "shape"))
  return jax.eval_shape(of_shapes, shapes)


def _describe(inputs: Inputs, implementation: str | None) -> Explanation:
  chosen = choose(inputs, implementation)
  reasons = {chosen.implementation: f"chosen, {chosen.reason}"}
  for name, known in IMPLEMENTATIONS.items():
    unsupported = known.unsupported(inputs)
    if name != chosen.implementation:
      reasons[name] = unsupported or _why_not_chosen(known, chosen)
    if not unsupported and not known.is_compiled():
      reasons[name] += f"; interpreted, and slow: no {known.device.upper()}"
  return Explanation(chosen.implementation, reasons)


def _why_not_chosen(known: Implementation, chosen: Choice) -> str:
  if known.device and known.is_compiled():
    page = "results/attention.md says where it was timed"
    return f"can do it if implementation= names it: {page}"
  return f"can do it, but {chosen.implementation} is preferred"
