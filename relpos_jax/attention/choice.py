"""Which implementation runs: what each can do, and which is the fastest here."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from relpos_jax.attention import chunked, per_position, projected, reference, skew
from relpos_jax.attention.inputs import Inputs, gather_inputs
from relpos_jax.attention.platform import target_platform
from relpos_jax.attention.relations import RelativePositions
from relpos_jax.typing import Array, ArrayLike


class Implementation(NamedTuple):
  """How attention is computed, why it cannot be for some calls (None where it can), and on what.

  A kernel is made for one kind of device, and interpreted elsewhere.
  """

  attention: Callable[[Inputs], Array]
  unsupported: Callable[[Inputs], str | None] = lambda inputs: None
  device: str | None = None

  def is_interpreted(self) -> bool:
    """Whether its device is not the one compiled for."""
    return self.device not in (None, target_platform())


def _kernel(name: str, device: str) -> Implementation:
  """Returns a Pallas kernel whose module, slow to import, is imported when it is first used."""
  module = lambda: importlib.import_module(f"relpos_jax.attention.{name}")
  attention = lambda inputs: module().attention(inputs)
  return Implementation(attention, lambda inputs: module().unsupported(inputs), device)


# The names that `implementation=` takes.
IMPLEMENTATIONS: Mapping[str, Implementation] = {
  "reference": Implementation(reference.attention),
  "per_position": Implementation(per_position.attention),
  "skew": Implementation(skew.attention, skew.unsupported),
  "projected": Implementation(projected.attention),
  "chunked": Implementation(chunked.attention, chunked.unsupported),
  "pallas_tpu": _kernel("pallas_tpu", device="tpu"),
  "pallas_gpu": _kernel("pallas_gpu", device="gpu"),
}


# jax.nn's attention is not asked for by name: call it.
PLAIN = "jax.nn"

# Why the others that can do a call do not; {} is the one that does.
FASTER, PREFERRED = "{} is faster", "{} is preferred, not measured yet"
# Where times are known; elsewhere nothing is said to be faster.
MEASURED = ("cpu",)


class Rule(NamedTuple):
  """Where it `applies`, and the implementation can do the call, that one runs, for this reason.

  `others`: what is said of those that can do the call too.
  """

  implementation: str
  reason: str
  applies: Callable[[Inputs], bool] = lambda inputs: True
  others: str = FASTER


def _gathered_is_small(inputs: Inputs) -> bool:
  """At most 64 keys, and vectors [B or 1, T, S, 1 or N, H] no larger than weights [B, N, T, S]."""
  batch, _, heads, width = inputs.query.shape
  label_batch = max(len(inputs.query_positions), len(inputs.key_positions))
  table_heads = max(table.shape[1] for table in _tables(inputs))
  return inputs.key.shape[1] <= 64 and label_batch * table_heads * width <= batch * heads


def _long_on_a_tpu(inputs: Inputs) -> bool:
  """From the longest sequences of the paper on. No time was measured yet.

  There, 64 rows of 256 tokens on 4 chips of v5e, a training step of the paper's base moves a fifth
  of what `projected` moves from and to memory, by the TPU compiler's count and the kernel's own:
  `scaling-base` in results/scaling.md. Shorter ones were not compiled.
  """
  pairs = inputs.query.shape[1] * inputs.key.shape[1]
  return target_platform() == "tpu" and pairs >= 256**2


def _long_on_a_gpu(inputs: Inputs) -> bool:
  """Long enough that weights [T, S] would be most of the memory's traffic. Not measured yet."""
  return target_platform() == "gpu" and inputs.key.shape[1] >= 256


def _long_for_a_loop_over_heads(inputs: Inputs) -> bool:
  """On a CPU at least 128 keys; elsewhere weights of 4 GiB, which is not measured yet."""
  batch, num_queries, heads, _ = inputs.query.shape
  num_keys = inputs.key.shape[1]
  if target_platform() == "cpu":
    return num_keys >= 128
  return batch * heads * num_queries * num_keys >= 2**30


def _tables(inputs: Inputs) -> list[Array]:
  return jax.tree.leaves((inputs.relations.key, inputs.relations.value))


# The first that applies. As measured on CPUs, forward and backward: results/attention.md.
RULES: tuple[Rule, ...] = (
  Rule(
    PLAIN,
    "there are neither relations nor dropout",
    lambda inputs: inputs.relations is None and inputs.dropout_seeds is None,
    others="relations=None is jax.nn's attention",
  ),
  Rule("pallas_tpu", "it is the one made for TPUs, and sequences are long", _long_on_a_tpu),
  Rule("pallas_gpu", "it is the one made for GPUs, and sequences are long", _long_on_a_gpu),
  Rule(
    "per_position",
    "sequences are short, and the vectors it gathers no larger than the weights",
    lambda inputs: isinstance(inputs.relations, RelativePositions) and _gathered_is_small(inputs),
  ),
  Rule(
    "chunked",
    "sequences are long, and it never writes out their weights",
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
  """The rule that decides which implementation runs, checked to be able to."""
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
  return Rule(implementation, "it is asked for by name", others="{} is asked for")


class Explanation(NamedTuple):
  """What `explain` answers; printed, a line for each implementation.

  Attributes:
    implementation: the one that would run; "jax.nn" is `jax.nn.dot_product_attention`.
    reasons: why it would run and, by name, why each other would not.
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
  """Says which implementation `dot_product_attention` would run, and why each other would not.

  Takes its arguments; arrays may be `jax.ShapeDtypeStruct`s. Nothing is computed.

  Raises:
    ValueError, NotImplementedError: where `dot_product_attention` would.
    TypeError: it has no such option.

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
  better = _better(rule)
  why_not = {name: _why_not(name, inputs, better) for name in IMPLEMENTATIONS if name != chosen}
  return Explanation(chosen, {chosen: why_chosen} | why_not)


def _better(rule: Rule) -> str:
  """What the one chosen has over the others, as far as is known here."""
  known = target_platform() in MEASURED or rule.others != FASTER
  return (rule.others if known else PREFERRED).format(rule.implementation)


def check_names(function: str, options: Mapping[str, object]) -> None:
  """Raises TypeError at the first option that the operator has not."""
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
  """The call's inputs with shapes in place of numbers."""
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
