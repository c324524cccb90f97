"""The choice of the implementation: what each supports, and which is the fastest."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from relpos_jax.attention import band, chunked, per_position, projected, reference, skew
from relpos_jax.attention.inputs import Inputs, gather_inputs
from relpos_jax.attention.relations import RelativePositions
from relpos_jax.typing import Array, ArrayLike


class Implementation(NamedTuple):
  """A way to compute attention.

  Attributes:
    attention: computes it.
    unsupported: returns why a call is not supported, or None if it is.
    device: the only platform that a kernel compiles for; elsewhere it is interpreted.
  """

  attention: Callable[[Inputs], Array]
  unsupported: Callable[[Inputs], str | None] = lambda inputs: None
  device: str | None = None

  def is_interpreted(self) -> bool:
    """Returns whether a kernel is interpreted on the current platform."""
    return self.device not in (None, target_platform())


def _kernel(name: str, device: str) -> Implementation:
  """Returns a Pallas kernel; its module is slow to import, so it is imported on first use."""
  module = lambda: importlib.import_module(f"relpos_jax.attention.{name}")
  attention = lambda inputs: module().attention(inputs)
  return Implementation(attention, lambda inputs: module().unsupported(inputs), device)


# The names that `implementation=` takes.
IMPLEMENTATIONS: Mapping[str, Implementation] = {
  "reference": Implementation(reference.attention),
  "per_position": Implementation(per_position.attention),
  "skew": Implementation(skew.attention, band.unsupported),
  "projected": Implementation(projected.attention),
  "chunked": Implementation(chunked.attention, chunked.unsupported),
  "pallas_tpu": _kernel("pallas_tpu", device="tpu"),
  "pallas_gpu": _kernel("pallas_gpu", device="gpu"),
}


# `implementation=` does not take this name: users can call jax.nn themselves.
PLAIN = "jax.nn"

# Why other implementations that support a call do not run; {} is the one that runs.
FASTER, PREFERRED = "{} is faster", "{} is preferred, not measured yet"
MEASURED = ("cpu",)  # platforms with measured times; on others `explain` claims no speed


class Rule(NamedTuple):
  """An implementation, and when to choose it.

  Attributes:
    implementation: runs if the rule `applies` and the implementation supports the call.
    reason: why, for `explain`.
    applies: returns whether the rule applies to a call.
    others: why other implementations that support the call do not run.
  """

  implementation: str
  reason: str
  applies: Callable[[Inputs], bool] = lambda inputs: True
  others: str = FASTER


def _gathered_is_small(inputs: Inputs) -> bool:
  """Checks for at most 64 keys, and vectors [B or 1, T, S, 1 or N, H] no larger than weights."""
  batch, _, heads, width = inputs.query.shape
  label_batch = max(len(inputs.query_positions), len(inputs.key_positions))
  tables = inputs.relations.key, inputs.relations.value
  table_heads = max(table.shape[1] for table in jax.tree.leaves(tables))
  return inputs.key.shape[1] <= 64 and label_batch * table_heads * width <= batch * heads


def _long_on_a_tpu(inputs: Inputs) -> bool:
  """Checks for 256 tokens or more, the longest sequences of the paper. Not measured yet.

  At 64 rows of 256 tokens on 4 chips of v5e, the kernel's training step of the base model has a
  fifth of the memory traffic of `projected`, as the compilers count it: `scaling-base` in
  results/scaling.md.
  """
  pairs = inputs.query.shape[1] * inputs.key.shape[1]
  return target_platform() == "tpu" and pairs >= 256**2


def _long_on_a_gpu(inputs: Inputs) -> bool:
  """Checks for keys so many that weights [T, S] dominate memory traffic. Not measured yet."""
  return target_platform() == "gpu" and inputs.key.shape[1] >= 256


def _long_for_a_loop_over_heads(inputs: Inputs) -> bool:
  """Checks for 128 keys on a CPU; elsewhere for weights of 4 GiB, which is not measured yet."""
  batch, num_queries, heads, _ = inputs.query.shape
  num_keys = inputs.key.shape[1]
  if target_platform() == "cpu":
    return num_keys >= 128
  return batch * heads * num_queries * num_keys >= 2**30


# The first that applies is chosen. CPU times, forward and backward: results/attention.md.
RULES: tuple[Rule, ...] = (
  Rule(
    PLAIN,
    "there are neither relations nor dropout",
    lambda inputs: inputs.relations is None and inputs.dropout_seeds is None,
    others="relations=None is jax.nn's attention",
  ),
  Rule("pallas_tpu", "it is the kernel for TPUs, and sequences are long", _long_on_a_tpu),
  Rule("pallas_gpu", "it is the kernel for GPUs, and sequences are long", _long_on_a_gpu),
  Rule(
    "per_position",
    "sequences are short, and the vectors it gathers no larger than the weights",
    lambda inputs: isinstance(inputs.relations, RelativePositions) and _gathered_is_small(inputs),
  ),
  Rule(
    "chunked",
    "sequences are long, and it does not store their weights",
    _long_for_a_loop_over_heads,
  ),
  Rule(
    "reference",
    "there are no relations",
    lambda inputs: inputs.relations is None,
    others=PREFERRED,
  ),
  Rule("projected", "it can do any call, and gathers no vectors"),
)


def choose(inputs: Inputs, implementation: str | None = None) -> Rule:
  """Returns the rule whose implementation runs; raises if the one asked for does not support it."""
  if implementation is None:
    return next(
      rule
      for rule in RULES
      if rule.applies(inputs) and not _unsupported(rule.implementation, inputs)
    )
  if not isinstance(implementation, str) or implementation not in IMPLEMENTATIONS:
    known = ", ".join(IMPLEMENTATIONS)
    raise ValueError(f"implementation is {implementation!r}; want None or one of {known}")
  if reason := _unsupported(implementation, inputs):
    raise NotImplementedError(f"implementation {implementation!r} cannot do this call: {reason}")
  return Rule(implementation, "implementation= names it", others="implementation= names {}")


class Explanation(NamedTuple):
  """The result of `explain`; its string has a line for each implementation.

  Attributes:
    implementation: its name; "jax.nn" is `jax.nn.dot_product_attention`.
    reasons: by name, why it would run and why the others would not.
  """

  implementation: str
  reasons: dict[str, str]

  def __str__(self) -> str:
    lines = [f"{name}: {reason}" for name, reason in self.reasons.items()]
    return "\n".join(lines)


def explain(
  query: ArrayLike | jax.ShapeDtypeStruct,
  key: ArrayLike | jax.ShapeDtypeStruct,
  value: ArrayLike | jax.ShapeDtypeStruct,
  bias: ArrayLike | jax.ShapeDtypeStruct | None = None,
  mask: ArrayLike | jax.ShapeDtypeStruct | None = None,
  *,
  implementation: str | None = None,
  **options,
) -> Explanation:
  """Explains which implementation `dot_product_attention` would run, and why not the others.

  Takes its arguments; arrays may be `jax.ShapeDtypeStruct`s. Nothing is computed.

  Raises:
    ValueError, NotImplementedError: as `dot_product_attention`.
    TypeError: an option has an unknown name.

  >>> import jax.numpy as jnp
  >>> from relpos_jax import RelativePositions
  >>> q = jax.ShapeDtypeStruct((32, 16, 4, 32), jnp.float32)
  >>> table = jax.ShapeDtypeStruct((33, 32), jnp.float32)
  >>> positions = jax.ShapeDtypeStruct((16,), jnp.int32)
  >>> relations = RelativePositions(table, table)
  >>> print(explain(q, q, q, relations=relations, query_positions=positions))
  per_position: chosen, sequences are short, and the vectors it gathers no larger than the weights
  reference: can do it, but per_position is faster
  skew: positions are given; it needs the default ones, 0, 1, 2, ...
  projected: can do it, but per_position is faster
  chunked: positions are given; it needs the default ones, 0, 1, 2, ...
  pallas_tpu: positions are given; it needs the default ones, 0, 1, 2, ...
  pallas_gpu: positions are given; it needs the default ones, 0, 1, 2, ...
  """
  check_names("explain", options)
  inputs = _abstract_inputs((query, key, value, bias, mask), options)
  rule = choose(inputs, implementation)
  chosen = rule.implementation
  why_chosen = f"chosen, {rule.reason}"
  if chosen != PLAIN and IMPLEMENTATIONS[chosen].is_interpreted():
    why_chosen += f"; interpreted, and slow: no {IMPLEMENTATIONS[chosen].device.upper()}"
  is_known = target_platform() in MEASURED or rule.others != FASTER
  better = (rule.others if is_known else PREFERRED).format(chosen)
  why_not = {name: _why_not(name, inputs, better) for name in IMPLEMENTATIONS if name != chosen}
  return Explanation(chosen, {chosen: why_chosen} | why_not)


def target_platform() -> str:
  """Returns the platform of the mesh in context, or JAX's default: "cpu", "gpu" or "tpu".

  A mesh in context may have devices of this machine (`jax.set_mesh`) or described ones
  (`jax.experimental.topologies`); code traced in it is compiled for them.

  >>> from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
  >>> chip = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
  >>> with use_abstract_mesh(AbstractMesh((8,), ("data",), abstract_device=chip)):
  ...   target_platform()
  'tpu'
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  platform = jax.default_backend() if device is None else device.platform
  return "gpu" if platform in ("cuda", "rocm") else platform


def check_names(function: str, options: Mapping[str, object]) -> None:
  """Raises TypeError at the first option that the operator does not have."""
  known = inspect.signature(gather_inputs).parameters
  for name in options:
    if name not in known:
      wanted = ", ".join(known)
      raise TypeError(
        f"{function}() got an unexpected keyword argument {name!r}; want one of {wanted}"
      )


def _why_not(name: str, inputs: Inputs, better: str) -> str:
  if reason := _unsupported(name, inputs):
    return reason
  implementation = IMPLEMENTATIONS[name]
  if implementation.is_interpreted():
    device = implementation.device.upper()
    return f"can do it, but there is no {device} here: it would be interpreted, and slow"
  return f"can do it, but {better}"


def _unsupported(name: str, inputs: Inputs) -> str | None:
  return None if name == PLAIN else IMPLEMENTATIONS[name].unsupported(inputs)


def _abstract_inputs(arguments: tuple, options: dict) -> Inputs:
  """Returns the inputs of a call with shapes instead of arrays."""
  leaves, structure = jax.tree.flatten((arguments, options))
  is_array = [hasattr(leaf, "shape") for leaf in leaves]
  found = []

  def gather(arrays):
    arrays = iter(arrays)
    full = [next(arrays) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
    arguments, options = jax.tree.unflatten(structure, full)
    found.append(gather_inputs(*arguments, **options))

  jax.eval_shape(gather, [leaf for leaf, array in zip(leaves, is_array, strict=True) if array])
  return found[0]
