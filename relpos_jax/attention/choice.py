"""The choice of the implementation: what each supports, and which is the fastest."""

import collections
import contextvars
import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.attention import band, chunked, reference, skew
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


class Implementation(NamedTuple):
  """A way to compute attention."""

  attention: Callable[[Inputs], Array]
  unsupported: Callable[[Inputs], str | None] = lambda inputs: (
    None
  )  # why, or None if it can
  device: str | None = (
    None  # the only platform it compiles for; elsewhere it is interpreted
  )


def _kernel(name: str, device: str) -> Implementation:
  """Returns a Pallas kernel; its module is slow to import, so it is imported on first use."""

  def of_module(function):
    module = f"relpos_jax.attention.{name}"
    return lambda inputs: getattr(importlib.import_module(module), function)(inputs)

  return Implementation(of_module("attention"), of_module("unsupported"), device)


# The names that `implementation=` takes.
IMPLEMENTATIONS: Mapping[str, Implementation] = {
  "reference": Implementation(reference.attention),
  "per_position": Implementation(reference.per_position),
  "skew": Implementation(skew.attention, skew.unsupported),
  "projected": Implementation(reference.projected),
  "chunked": Implementation(chunked.attention, chunked.unsupported),
  "pallas_tpu": _kernel("pallas_tpu", device="tpu"),
  "pallas_gpu": _kernel("pallas_gpu", device="gpu"),
}

# The names of those that are compiled for one kind of device.
KERNELS = [
  name for name, implementation in IMPLEMENTATIONS.items() if implementation.device
]

# `implementation=` does not take this name: users can call jax.nn themselves.
PLAIN = "jax.nn"


class Rule(NamedTuple):
  """An implementation, which runs if it supports the call and the rule `applies`."""

  implementation: str
  reason: str
  applies: Callable[[Inputs], bool] = lambda inputs: True


def _gathered_is_small(inputs: Inputs) -> bool:
  """Returns whether, on a CPU, fewer than 64 keys have gathered vectors no larger than weights."""
  if target_platform() != "cpu" or [type(x) for x in inputs.relations] != [
    RelativePositions
  ]:
    return False
  batch, _, heads, width = inputs.query.shape
  label_batch = max(len(inputs.query_positions), len(inputs.key_positions))
  table_heads = max(table.shape[1] for table in jax.tree.leaves(inputs.relations))
  return inputs.key.shape[1] < 64 and label_batch * table_heads * width <= batch * heads


def _num_pairs(inputs: Inputs) -> int:
  """Returns the number of weights, over all heads and sequences."""
  batch, num_queries, heads, _ = inputs.query.shape
  return batch * heads * num_queries * inputs.key.shape[1]


def _is_long(inputs: Inputs) -> bool:
  """Returns whether keys are many: 64 on a CPU (512 for few queries), else 1 GiB of
  weights.

  Without a band, which makes `chunked` twice as fast, they are many on a CPU from 16
  MiB on.
  """
  if target_platform() == "cpu" and band.unsupported(inputs):
    return _num_pairs(inputs) >= 2**22
  if target_platform() == "cpu":
    return inputs.key.shape[1] >= (512 if reference.has_few_queries(inputs) else 64)
  mesh = jax.sharding.get_abstract_mesh()
  num_devices = math.prod(mesh.shape[x] for x in (*mesh.auto_axes, *mesh.explicit_axes))
  return _num_pairs(inputs) >= 2**28 * num_devices


def _is_timed_on_gpu(inputs: Inputs) -> bool:
  """Returns whether a call is causal self-attention from 1,024 tokens on, in bfloat16,
  on one H200.

  Timed were heads of 64 numbers, without relations or with 18 rows of tables, at 1,024
  to 4,096 tokens. The rule allows one row for 16 tokens, and 1 GiB for the band.
  """
  if target_device().device_kind != "NVIDIA H200" or num_target_devices() > 1:
    return False
  low, high = band.kernel_limits(inputs)
  (batch, length, heads, width), rows = inputs.query.shape, high - low + 1
  return (
    inputs.is_causal
    and (inputs.query.dtype, width) == (jnp.bfloat16, 64)
    and {*map(type, inputs.relations)} <= {RelativePositions}
    and inputs.key.shape[1] == length >= max(1024, 16 * rows)
    and 4 * batch * heads * length * rows <= 2**30
  )


# The first that applies is chosen. Kernels are among them where a page in results/
# shows that they are right and faster on a kind of device. The lengths on CPUs are from
# times, forward and backward: `chunked` is slower than `per_position` at 32 tokens,
# about as fast at 64, in a fifth of the memory, and faster from 128 on:
# results/attention.md. Elsewhere little is timed, and the rules follow the compiler for
# TPUs, results/tpu_costs.md: `projected` moves the fewest bytes, and takes three times
# the weights in temporary memory, with 1 GiB of them 3 of a v5e's 16 GB.
RULES: tuple[Rule, ...] = (
  Rule(
    # Forward and backward it takes 0.54 times as long as jax.nn without relations at
    # 1,024 tokens, and 0.40 times at 4,096; without relations 0.29 and 0.27:
    # results/attention.md.
    "pallas_gpu",
    "on this GPU it is faster than jax.nn without relations and than chunked",
    _is_timed_on_gpu,
  ),
  Rule(
    "chunked",
    "queries are few and keys are many, on a CPU",
    lambda x: reference.has_few_queries(x) and _is_long(x),
  ),
  # jax.nn would transpose the keys and the values.
  Rule("projected", "queries are few, on a CPU", reference.has_few_queries),
  Rule(
    "chunked",
    "there are no relations but many pairs, and it does not store their weights",
    # Forward and backward, on a CPU, it takes 0.66 times as long as jax.nn at 512
    # tokens (causal: 0.48), and a seventh of the memory: results/attention.md. With a
    # bias it takes three quarters to a tenth of the memory from this number of pairs
    # on.
    lambda x: not x.relations and _is_long(x) and _num_pairs(x) >= 2**20,
  ),
  Rule(
    PLAIN,
    "there are no relations (cross-attention has none), nor options that jax.nn lacks",
    lambda x: (
      not (x.relations or x.return_residual)
      and x.dropout_seeds is x.soft_cap is x.sinks is None
      and x.value.shape == x.key.shape  # jax.nn takes no others
      # Compiled, jax.nn asks for a product of float16 that only GPUs have.
      and (x.query.dtype != jnp.float16 or target_platform() == "gpu")
    ),
  ),
  Rule("projected", "a dimension is symbolic", lambda x: is_symbolic(x.query, x.key)),
  Rule(
    "per_position",
    "keys are below 64, and it gathers no more numbers than there are weights",
    _gathered_is_small,
  ),
  Rule("chunked", "keys are many, and it does not store their weights", _is_long),
  Rule("reference", "there are no relations", lambda inputs: not inputs.relations),
  Rule("projected", "weights fit into memory, and it gathers no vectors"),
)

# Set to a list, it collects the rules of the calls that are traced; the deque stays
# empty.
used_rules = contextvars.ContextVar("used_rules", default=collections.deque(maxlen=0))  # noqa: B039


def choose(inputs: Inputs, implementation: str | None = None) -> Rule:
  """Returns the rule whose implementation runs; raises if the one asked for does not support it."""
  reason = "implementation= names it"
  if (
    implementation is None and axes_of_keys()[1] > 1
  ):  # the others would gather the keys
    implementation, reason = (
      "chunked",
      "mesh_axes shards the keys, and it passes them round",
    )
  if implementation is None:
    able = (x for x in RULES if _can_run(x.implementation, inputs))
    return next(rule for rule in able if rule.applies(inputs))
  if implementation not in IMPLEMENTATIONS:
    wanted = f"None, which chooses, or one of {', '.join(IMPLEMENTATIONS)}"
    if implementation in ("xla", "cudnn"):
      wanted += ". It is a name of jax.nn: leave implementation out"
    raise ValueError(f"implementation is {implementation!r}; want {wanted}")
  if why := IMPLEMENTATIONS[implementation].unsupported(inputs):
    raise NotImplementedError(
      f"implementation {implementation!r} cannot do this call: {why}"
    )
  return Rule(implementation, reason)


def _can_run(name: str, inputs: Inputs) -> bool:
  """Returns whether an implementation supports the call, compiled."""
  if name == PLAIN:
    return True
  _, unsupported, device = IMPLEMENTATIONS[
    name
  ]  # a kernel's module is imported where it compiles
  return device in (None, target_platform()) and not unsupported(inputs)


class Explanation(NamedTuple):
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
  pallas_tpu: positions or query_offset are given; it needs 0, 1, 2, ...
  pallas_gpu: positions or query_offset are given; it needs 0, 1, 2, ...
  """
  found = []

  def gather(arrays, options):
    found.append(gather_inputs(*arrays, **options))

  jax.eval_shape(*of_arrays(gather, (arrays, options), lambda x: hasattr(x, "shape")))
  (inputs,) = found
  chosen, reason, _ = choose(inputs, implementation)
  reasons = {chosen: f"chosen, {reason}"}
  for name, (_, unsupported, device) in IMPLEMENTATIONS.items():
    if reason := name != chosen and unsupported(inputs):
      reasons[name] = reason
      continue
    is_compiled = device in (None, target_platform())
    able = f"can do it, but {chosen} is preferred"
    if device and is_compiled:
      able = "can do it if implementation= names it: results/attention.md says where it was timed"
    reasons[name] = reasons.get(name, able)
    reasons[name] += (
      "" if is_compiled else f"; interpreted, and slow: no {device.upper()}"
    )
  return Explanation(chosen, reasons)
