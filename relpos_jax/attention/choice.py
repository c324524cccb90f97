"""The choice of an implementation: what each supports, and which is fastest."""

import dataclasses
import importlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from relpos_jax.attention import band, blocks, chunked, reference, ring, skew
from relpos_jax.attention.inputs import Inputs, gather_inputs, is_symbolic
from relpos_jax.attention.partitioned import (
  axes_of_keys,
  num_target_devices,
  split_arrays,
  target_device,
  target_platform,
)
from relpos_jax.attention.relations import ByDistance, RelativePositions
from relpos_jax.typing import Array

# Logs the implementation and the reason for each traced call, at level DEBUG.
logger = logging.getLogger(__name__)


def _takes_every_call(inputs: Inputs) -> None:
  return None


class Implementation(NamedTuple):
  """Holds the functions of one implementation."""

  attention: Callable[[Inputs], Array | tuple[Array, Array]]
  # Returns the reason why it cannot run a call, or None.
  unsupported: Callable[[Inputs], str | None] = _takes_every_call
  # The only platform that it compiles for; on others it is interpreted. None: all.
  device: str | None = None

  def is_compiled(self) -> bool:
    """Returns whether it is compiled, not interpreted, on the target platform."""
    return self.device in (None, target_platform())


def _kernel(module_name: str) -> Implementation:
  """Returns an implementation that imports its module when it is first used.

  Importing Pallas takes long.
  """

  def load() -> Any:
    return importlib.import_module(f"relpos_jax.attention.{module_name}")

  def attention(inputs: Inputs) -> Array:
    return load().attention(inputs)

  def unsupported(inputs: Inputs) -> str | None:
    return load().unsupported(inputs)

  return Implementation(attention, unsupported, device="gpu")


def _chunked(inputs: Inputs) -> Array | tuple[Array, Array]:
  """Computes attention in chunks, so that not all weights are in memory.

  If keys are sharded, they go around a ring of devices. Otherwise, if the call has a
  band (band.py), each block of queries attends to one tile of keys after another. In
  all other calls, each block attends to all keys at once.
  """
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
  "pallas_gpu": _kernel("pallas_gpu"),
  "mosaic_gpu": _kernel("mosaic_gpu"),
}


class Choice(NamedTuple):
  """Holds the name of an implementation, and the reason to choose it."""

  implementation: str
  reason: str


# Not names for `implementation=`, since users can call jax.nn themselves.
PLAIN = "jax.nn"
CUDNN = "cudnn"


# A kernel is chosen only if a page in results/ shows that it is exact and faster on the
# kind of device. The lengths for CPUs come from times of the forward and backward
# passes. Little was timed on other devices: there the choice follows the costs that the
# TPU compiler reports, results/tpu_costs.md.
def _is_timed_on_gpu(inputs: Inputs) -> bool:
  """Returns whether "pallas_gpu" was the fastest in timed calls like this one.

  The timed calls are causal self-attention in bfloat16 on one H200, with head width 64
  and 1,024 to 4,096 tokens. They have no relations, or relations with 18 table rows.
  Calls with longer sequences or more rows count, too, if they have at most one row per
  16 tokens, and if their logits by row take at most 1 GiB.

  A forward and a backward pass of the kernel took this fraction of the time that jax.nn
  took without relations (results/attention.md):

  - with relations: 0.54 at 1,024 tokens and 0.40 at 4,096
  - without relations: 0.29 at 1,024 tokens and 0.27 at 4,096
  """
  if target_device().device_kind != "NVIDIA H200" or num_target_devices() > 1:
    return False
  batch, length, heads, width = inputs.query.shape
  if (inputs.query.dtype, width) != (jnp.bfloat16, 64) or not inputs.is_causal:
    return False
  if any(type(relation) is not RelativePositions for relation in inputs.relations):
    return False
  low, high = band.ends(inputs)
  num_rows = high - low + 1
  band_bytes = 4 * batch * heads * length * num_rows
  is_long = length >= max(1024, 16 * num_rows)
  return is_long and inputs.key.shape[1] == length and band_bytes <= 2**30


def _is_timed_with_cudnn(inputs: Inputs) -> bool:
  """Returns whether cuDNN was the fastest, in a call that `_is_timed_on_gpu` accepts.

  It was the fastest from 2,048 tokens on, without relations and with no option except
  causality. A forward and a backward pass took this fraction of jax.nn's time
  (results/attention.md):

  - cuDNN: 0.25 at 2,048 tokens and 0.22 at 4,096
  - the kernel: 0.28 at 2,048 tokens and 0.27 at 4,096
  """
  masks = inputs.mask, inputs.query_mask, inputs.key_mask, inputs.query_segment_ids
  options = *masks, inputs.bias, inputs.window
  is_causal_only = all(option is None for option in options)
  is_static = inputs.starts_at_zero and not isinstance(inputs.scale, Tracer)
  is_long = inputs.query.shape[1] >= 2048
  return is_long and _is_plain(inputs) and is_causal_only and is_static


def _num_pairs(inputs: Inputs) -> int:
  """Returns the number of pairs of query and key, over all heads and sequences."""
  batch, num_queries, heads, _ = inputs.query.shape
  return batch * heads * num_queries * inputs.key.shape[1]


def _is_long(inputs: Inputs) -> bool:
  """Returns whether there are enough keys to prefer `chunked`, for its memory.

  On a CPU, `chunked` is preferred from 512 keys on. There it takes about as long as
  `projected` with relations, and 1.3 times as long or more without, in an eighth of the
  memory (results/attention.md). If queries are not few, it is also preferred from 128
  keys on, if all weights together take 16 MiB or more. Without a band (band.py) it
  takes longer, and is preferred if the weights take 16 MiB or more.

  On other devices, `chunked` is preferred if the weights take 1 GiB or more per device.
  With fewer weights, `projected` moves the fewest bytes. Its temporary arrays take
  three times the memory of the weights: for 1 GiB, 3 of the 16 GB of a TPU v5e.
  """
  num_pairs, num_keys = _num_pairs(inputs), inputs.key.shape[1]
  if target_platform() == "cpu":
    has_large_weights = num_pairs >= 2**22
    if band.unsupported(inputs):
      return has_large_weights
    if reference.has_few_queries(inputs):
      return num_keys >= 512
    return num_keys >= (128 if has_large_weights else 512)
  mesh = jax.sharding.get_abstract_mesh()
  axes = *mesh.auto_axes, *mesh.explicit_axes
  num_devices = math.prod(mesh.shape[axis] for axis in axes)
  return num_pairs >= 2**28 * num_devices


def _is_plain(inputs: Inputs) -> bool:
  """Returns whether jax.nn can compute the call."""
  if inputs.relations or inputs.return_residual:
    return False
  lacking = inputs.dropout_seeds, inputs.soft_cap, inputs.sinks, inputs.silu_divisor
  if any(option is not None for option in lacking):
    return False
  if inputs.value.shape != inputs.key.shape:  # jax.nn refuses other widths
    return False
  # Only GPUs have the product of float16 that jax.nn compiles.
  return inputs.query.dtype != jnp.float16 or target_platform() == "gpu"


def _tables_by_distance(inputs: Inputs) -> list[Array]:
  """Returns the tables of all relations; none if a relation has no distances."""
  tables = []
  for relation in inputs.relations:
    if not isinstance(relation, ByDistance):
      return []
    tables += relation.tables
  return tables


def _has_small_vectors(inputs: Inputs, tables: list[Array]) -> bool:
  """Returns whether the vectors of all pairs take no more memory than the weights.

  Sequences that share their positions share the vectors.
  """
  batch, _, heads, _ = inputs.query.shape
  label_batch = max(len(inputs.query_positions), len(inputs.key_positions))
  numbers_of_row = max(math.prod(table.shape[1:]) for table in tables)
  return label_batch * numbers_of_row <= batch * heads


def _has_many_rows(inputs: Inputs, tables: list[Array]) -> bool:
  """Returns whether `projected` would multiply by two rows or more for each key.

  If the call has a band (band.py), it leaves out rows that no pair has.
  """
  num_rows, num_keys = max(map(len, tables)), inputs.key.shape[1]
  return num_rows >= 2 * num_keys and band.unsupported(inputs) is not None


def _fastest_gather(inputs: Inputs) -> Choice | None:
  """Chooses `per_position` if it is faster to gather a vector for each pair.

  It is faster on a CPU if the vectors take no more memory than the weights, in these
  cases:

  - There are fewer than 128 keys and one `RelativePositions` (results/attention.md).
  - `projected` would multiply by two rows or more for each key, as where positions are
    given and drawn at random.
  """
  tables = _tables_by_distance(inputs)
  if target_platform() != "cpu" or not tables:
    return None
  if not _has_small_vectors(inputs, tables):
    return None
  is_short = inputs.key.shape[1] < 128
  kinds = [type(relation) for relation in inputs.relations]
  if is_short and kinds == [RelativePositions]:
    reason = "under 128 keys, with gathered vectors no larger than the weights"
    return Choice("per_position", reason)
  fits = is_short or not _is_long(inputs)
  if fits and _has_many_rows(inputs, tables):
    reason = "tables have many rows, and gathered vectors are no larger than weights"
    return Choice("per_position", reason)
  return None


_CHOICE_OF_PLAIN = Choice(
  PLAIN,
  "there are no relations (cross-attention has none), nor options that jax.nn lacks",
)


def choose(inputs: Inputs, implementation: str | None = None) -> Choice:
  """Chooses the implementation that runs a call, and logs the reason.

  Raises if `implementation` names one that does not support the call.
  """
  if implementation is not None:
    _check(implementation, inputs)
    choice = Choice(implementation, "implementation= names it")
  elif axes_of_keys()[1] > 1:
    _check("chunked", inputs)  # other implementations would gather the keys
    choice = Choice("chunked", "mesh_axes shards the keys, and it passes them round")
  else:
    choice = _fastest(inputs)
  logger.debug("attention by %s, because %s", choice.implementation, choice.reason)
  return choice


def _fastest(inputs: Inputs) -> Choice:
  """Chooses the fastest implementation that fits in memory, for keys on one device."""
  if is_symbolic(inputs.query, inputs.key):
    if _is_plain(inputs):
      return _CHOICE_OF_PLAIN
    return Choice("projected", "a dimension is symbolic")
  timed = _fastest_on_gpu(inputs)
  if timed is not None:
    return timed
  if reference.has_few_queries(inputs):
    if _is_long(inputs):
      return Choice("chunked", "queries are few and keys are many, on a CPU")
    # jax.nn is slower, since it would transpose the keys and the values.
    return Choice("projected", "queries are few, on a CPU")
  gather = _fastest_gather(inputs)
  if gather is not None:
    return gather
  if _is_long(inputs):
    return Choice("chunked", "keys are many, and it does not store their weights")
  if _is_plain(inputs) and target_platform() != "cpu":
    return _CHOICE_OF_PLAIN
  # Without relations on a CPU it takes 0.7 to 1 times as long as jax.nn
  # (results/attention.md).
  return Choice("projected", "weights fit into memory, and it gathers no vectors")


def _fastest_on_gpu(inputs: Inputs) -> Choice | None:
  """Chooses cuDNN or a kernel if one was the fastest in timed calls like this one.

  Returns None if no such call was timed, or if the kernel does not support the call.
  """
  if not _is_timed_on_gpu(inputs):
    return None
  if _is_timed_with_cudnn(inputs):
    return Choice(CUDNN, "on this GPU it is the fastest without relations and masks")
  if IMPLEMENTATIONS["pallas_gpu"].unsupported(inputs):
    return None
  reason = "on this GPU it is faster than jax.nn without relations and than chunked"
  return Choice("pallas_gpu", reason)


def _check(name: str, inputs: Inputs) -> None:
  """Raises if there is no such implementation, or if it does not support the call."""
  if name not in IMPLEMENTATIONS:
    wanted = f"None, which chooses, or one of {', '.join(IMPLEMENTATIONS)}"
    if name in ("xla", "cudnn"):
      wanted += ". It is a name of jax.nn: leave implementation out"
    raise ValueError(f"implementation is {name!r}; want {wanted}")
  reason = IMPLEMENTATIONS[name].unsupported(inputs)
  if reason:
    raise NotImplementedError(f"implementation {name!r} cannot do this call: {reason}")


@jax.tree_util.register_static  # so that jax.eval_shape can return it
@dataclasses.dataclass(frozen=True, eq=False)
class Explanation:
  """Holds the result of `explain`. As a string, it has a line per implementation."""

  # "jax.nn" and "cudnn" mean `jax.nn.dot_product_attention`.
  implementation: str
  reasons: dict[str, str]  # for each name, why it would or would not run

  def __str__(self) -> str:
    return "\n".join(f"{name}: {reason}" for name, reason in self.reasons.items())


def explain(
  *arrays: Any, implementation: str | None = None, **options: Any
) -> Explanation:
  """Explains which implementation `dot_product_attention` would choose, and why.

  Takes the same arguments; arrays may also be `jax.ShapeDtypeStruct`s. It explains the
  call as `jax.jit` would trace it, so that integers out of range raise no error.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import RelativePositions
  >>> q = jax.ShapeDtypeStruct((32, 16, 4, 32), jnp.float32)
  >>> table = jax.ShapeDtypeStruct((33, 32), jnp.float32)
  >>> relations = RelativePositions(table, table)
  >>> print(explain(q, q, q, relations=relations, query_positions=jnp.arange(16)))
  per_position: chosen, under 128 keys, with gathered vectors no larger than the weights
  reference: can do it, but per_position is preferred
  skew: positions are given; if they are consecutive, give query_offset instead
  projected: can do it, but per_position is preferred
  chunked: can do it, but per_position is preferred
  pallas_gpu: positions or query_offset are given; it needs 0, 1, 2, ...
  mosaic_gpu: positions or query_offset are given; it needs 0, 1, 2, ...
  """

  def describe(arrays, options):
    return _describe(gather_inputs(*arrays, **options), implementation)

  def is_array(x):
    return hasattr(x, "shape") and not isinstance(x, np.generic)

  describe_shapes, shapes = split_arrays(describe, (arrays, options), is_array)
  return jax.eval_shape(describe_shapes, shapes)


def _describe(inputs: Inputs, implementation: str | None) -> Explanation:
  chosen = choose(inputs, implementation)
  reasons = {chosen.implementation: f"chosen, {chosen.reason}"}
  for name, known in IMPLEMENTATIONS.items():
    unsupported = known.unsupported(inputs)
    if name != chosen.implementation:
      reasons[name] = unsupported or _why_not_chosen(known, chosen)
    if known.device and not unsupported and not known.is_compiled():
      reasons[name] += f"; interpreted, and slow: no {known.device.upper()}"
  return Explanation(chosen.implementation, reasons)


def _why_not_chosen(known: Implementation, chosen: Choice) -> str:
  if known.device and known.is_compiled():
    page = "results/attention.md says where it was timed"
    return f"can do it if implementation= names it: {page}"
  return f"can do it, but {chosen.implementation} is preferred"
