"""What the operator's benchmark measures in JAX: our implementations, and jax.nn's attention."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from relpos_jax import RelativePositions, dot_product_attention
from relpos_jax.attention import skew
from relpos_jax.attention.choice import IMPLEMENTATIONS
from relpos_jax.attention.inputs import gather_inputs
from relpos_jax.evaluation.cost import compile_program, with_gradients

STOCK, AGAIN = "jax.nn", "jax.nn (again)"
# Those that never hold [T, S] weights: each is also timed without relations.
BLOCKWISE = ("chunked", "pallas_tpu", "pallas_gpu")


class Case(NamedTuple):
  """One call to measure: B sequences of T tokens, N heads of width H, tables of 2 k + 1 rows."""

  batch: int
  length: int
  heads: int
  width: int
  max_distance: int
  dtype: str
  is_causal: bool
  backward: bool

  @property
  def tokens_shape(self) -> tuple[int, int, int, int]:
    return self.batch, self.length, self.heads, self.width

  @property
  def table_shape(self) -> tuple[int, int]:
    return 2 * self.max_distance + 1, self.width


class Prepared(NamedTuple):
  """A case made ready to run.

  Attributes:
    run: computes it once, and returns what is to be waited for.
    temporary_bytes: by the compiler's account, of what is neither argument nor result; None where
      no compiler says so.
    bytes_needed: all that it needs at once; an estimate where no compiler says so.
  """

  run: Callable[[], Any]
  temporary_bytes: int | None
  bytes_needed: int


class Contestant(NamedTuple):
  """Something to measure.

  Attributes:
    relations: which it computes: "keys and values", "keys" or "none".
    what: it is, in a clause.
    prepare: makes a case ready; a RuntimeError, such as NotImplementedError, says why it cannot.
    runs_to_prepare: a case cannot be made ready, or its memory known, without running it.
  """

  relations: str
  what: str
  prepare: Callable[[Case], Prepared]
  runs_to_prepare: bool = False


def stock() -> Contestant:
  """What all others are compared with."""
  return Contestant("none", "`jax.nn.dot_product_attention`", _prepare(_jax_nn))


def implementation(name: str) -> Contestant:
  """One of ours, with relations."""
  what = f'`implementation="{name}"`'
  attention = _on_its_device(name, functools.partial(_ours, name))
  return Contestant("keys and values", what, _prepare(attention))


def without_relations(name: str) -> Contestant:
  """One of ours, forced to do a call that has no relations."""
  attention = _on_its_device(name, lambda case, q, k, v, _: _ours(name, case, q, k, v, None))
  return Contestant("none", f'`implementation="{name}"`, `relations=None`', _prepare(attention))


def _on_its_device(name, attention):
  def on_device(*arguments):
    device = IMPLEMENTATIONS[name].device
    if device not in (None, jax.default_backend()):
      raise NotImplementedError(f"there is no {device.upper()}: it would be interpreted")
    return attention(*arguments)

  return on_device


def _ours(name, case, query, key, value, relations):
  return dot_product_attention(
    query, key, value, relations=relations, is_causal=case.is_causal, implementation=name
  )


def _jax_nn(case, query, key, value, relations, *, bias=None, implementation=None):
  return jax.nn.dot_product_attention(
    query, key, value, bias=bias, is_causal=case.is_causal, implementation=implementation
  )


def _dense_bias(case, query, key, value, relations, *, implementation=None):
  """The relative key term of all pairs as jax.nn's bias."""
  inputs = gather_inputs(query, key, value, relations=relations)
  bias = (skew.relative_logits(inputs) * inputs.scale).astype(query.dtype)
  return _jax_nn(case, query, key, value, None, bias=bias, implementation=implementation)


def _on_gpu_only(attention):
  def on_gpu(*arguments):
    if jax.default_backend() != "gpu":
      raise NotImplementedError("it needs a GPU")
    return attention(*arguments, implementation="cudnn")

  return on_gpu


def _prepare(attention) -> Callable[[Case], Prepared]:
  """Compiles attention(case, query, key, value, relations) for a case."""

  def prepare(case: Case) -> Prepared:
    function = functools.partial(attention, case)
    function = with_gradients(function) if case.backward else function
    shapes = jax.eval_shape(lambda: _random_arguments(case))
    program = compile_program(function, *shapes)
    return Prepared(lambda: program.run(*arguments(case)), *program[1:])

  return prepare


@functools.lru_cache
def arguments(case: Case) -> tuple:
  """Random query, key, value and relations, after a random cotangent if there is a backward."""
  return jax.block_until_ready(_random_arguments(case))


def _random_arguments(case: Case) -> tuple:
  keys = jax.random.split(jax.random.key(0), 6)
  names = 3 + case.backward
  *cotangent, query, key, value = (
    jax.random.normal(key, case.tokens_shape, case.dtype) for key in keys[:names]
  )
  tables = (jax.random.normal(key, case.table_shape) for key in keys[4:])
  return *cotangent, query, key, value, RelativePositions(*tables)


JAX_PEERS: Mapping[str, Contestant] = {
  "dense_bias": Contestant(
    "keys", "`jax.nn.dot_product_attention`, the key term as a dense bias", _prepare(_dense_bias)
  ),
  "cudnn": Contestant(
    "none", '`jax.nn`, `implementation="cudnn"`', _prepare(_on_gpu_only(_jax_nn))
  ),
  "cudnn_dense_bias": Contestant(
    "keys",
    '`jax.nn`, `implementation="cudnn"`, the key term as a dense bias',
    _prepare(_on_gpu_only(_dense_bias)),
  ),
}
