"""Relations defined by a function of each pair of query and key."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.typing import DTypeLike

from relpos_jax.attention.arrays import (
  Shape,
  accumulation_dtype,
  as_array,
  describe,
  shape_text,
  with_one_batch_axis,
)
from relpos_jax.attention.relation import Relation, Sizes, Tokens
from relpos_jax.typing import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FunctionBias(Relation):
  """Adds a score_mod: any function of the positions and data of a query and a key.

  It adds `function(params, i, j, x_i, y_j, z_ij)` to the logit of query i and key j,
  after the scale. Write the function for one pair: `jax.vmap` maps it over all pairs.
  Gradients of the parameters and the data are exact, and the same in every run.

  Attributes:
    function: takes the parameters, the integer positions i and j, and the data of the
      query, the key and the pair, each None if not given. Returns a number, or `[N]`, a
      number per head.
    params: a tree of arrays.
    of_query: data of the queries, a tree of arrays `[B, T, ...]`. Arrays that all
      sequences share are `[T, ...]`, or `[1, T, ...]` with a 1 for each batch axis. A
      shape that may be shared or not, such as `[T, T]` for B = T, raises ValueError. If
      the array is shared, give it as `x[None]`. If not, map the call over the sequences
      with `jax.vmap`.
    of_key: data of the keys: `[B, S, ...]`, `[1, S, ...]` or `[S, ...]`.
    of_pair: data of the pairs: `[B, T, S, ...]`, `[1, T, S, ...]` or `[T, S, ...]`.

  KERPLE (Chi et al. 2022, equation 6) is a logarithm of the distance with two trained
  parameters:

  >>> import jax.numpy as jnp
  >>> from relpos_jax import dot_product_attention
  >>> def kerple(params, i, j, *_):
  ...   return -params["a"] * jnp.log1p(params["b"] * jnp.abs(i - j))
  >>> q, params = jnp.ones((10, 8, 64)), dict(a=jnp.ones(8), b=jnp.ones(8))
  >>> dot_product_attention(q, q, q, relations=FunctionBias(kerple, params)).shape
  (10, 8, 64)
  """

  function: Callable[..., Any] = dataclasses.field(metadata={"static": True})
  params: Any = None
  of_query: Any = None
  of_key: Any = None
  of_pair: Any = None

  query_fields = "of_query", "of_pair"

  def checked(self, name: str, sizes: Sizes) -> Relation:
    params = jax.tree.map(lambda x: as_array(f"{name}.params", x), self.params)
    batch, queries, keys = sizes.batch, sizes.queries, sizes.keys
    of_query = _check_data(f"{name}.of_query", self.of_query, batch, queries)
    of_key = _check_data(f"{name}.of_key", self.of_key, batch, keys)
    of_pair = _check_data(f"{name}.of_pair", self.of_pair, batch, queries, keys)
    relation = FunctionBias(self.function, params, of_query, of_key, of_pair)
    number = jax.eval_shape(self.function, params, *relation.shapes_of_pair(jnp.int32))
    is_real = False
    if hasattr(number, "shape"):
      kinds = jnp.floating, jnp.integer
      is_real = any(jnp.issubdtype(number.dtype, kind) for kind in kinds)
    if not is_real or number.shape not in ((), (sizes.heads,)):
      raise ValueError(
        f"{name}.function returns {describe(number)}; want a number, or "
        f"[{sizes.heads}], one per head"
      )
    return relation

  def shapes_of_pair(self, position_dtype: DTypeLike) -> tuple:
    """Returns the shapes of i, j, x_i, y_j and z_ij, the arguments for one pair."""
    position = jax.ShapeDtypeStruct((), position_dtype)
    of_query, of_key = _drop_axes((self.of_query, self.of_key), num_axes=2)
    of_pair = _drop_axes(self.of_pair, num_axes=3)
    return position, position, of_query, of_key, of_pair

  def as_program(self, position_dtype: DTypeLike) -> "FunctionBias":
    arguments = self.params, *self.shapes_of_pair(position_dtype)
    # A new lambda each time, since JAX caches traces by the identity of the function.
    closed = jax.make_jaxpr(lambda *x: self.function(*x))(*arguments)
    derivative = None
    if "custom_" in str(closed.jaxpr):  # a name that has it costs a trace, no more
      derivative = _trace_derivative(self.function, *arguments)
    program = PairProgram(closed, derivative)
    params = self.params, [jnp.asarray(x) for x in closed.consts]
    return dataclasses.replace(self, function=program, params=params)

  def logits(self, queries: Tokens, keys: Tokens) -> Float[Array, "#B #N T S"]:
    call_pair = functools.partial(self.function, self.params)
    map_keys = jax.vmap(call_pair, (None, 0, None, 0, 0))
    map_queries = jax.vmap(map_keys, (0, None, 0, None, 0))
    data = self.of_query, self.of_key, self.of_pair
    arguments = queries.positions, keys.positions, *data
    # The batch has size 1 if all sequences share positions and data.
    batch = max(len(x) for x in jax.tree.leaves(arguments))
    arguments = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), arguments
    )
    numbers = jax.vmap(map_queries)(*arguments)
    numbers = numbers.astype(accumulation_dtype(queries.vectors.dtype))
    is_shared = numbers.ndim == 3  # one number for all heads
    return numbers[:, None] if is_shared else jnp.moveaxis(numbers, -1, 1)


def _drop_axes(data: Any, num_axes: int) -> Any:
  """Returns the shapes of arrays without their first axes."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[num_axes:], x.dtype), data)


def _check_data(name: str, data: Any, batch: Shape, *tokens: int) -> Any:
  """Returns a tree of checked arrays [B or 1, *tokens, ...]."""

  def checked(x):
    return _with_one_batch_axis(name, as_array(name, x), batch, tokens)

  return jax.tree.map(checked, data)


def _with_one_batch_axis(name: str, x: Array, batch: Shape, tokens: Shape) -> Array:
  """Gives data one batch axis, of size 1 if all sequences share it."""
  ones = (1,) * len(batch)

  def begins_with(shape):
    return x.shape[: len(shape)] == shape

  has_ones = begins_with(ones + tokens)
  has_batch = has_ones or begins_with(batch + tokens)
  may_be_shared = begins_with(tokens)
  if not has_batch and not may_be_shared:
    own, shared = shape_text(*batch, *tokens, "..."), shape_text(*tokens, "...")
    want = " or ".join(dict.fromkeys((shared, own)))
    raise ValueError(f"{name} has an array of shape {x.shape}; want {want}")
  # For T = 1, a shape [1, 1] may mean [1, T] or, without batch axes, [T, P].
  may_lack_batch = x.ndim == len(batch + tokens) or not has_ones
  if batch and has_batch and may_be_shared and may_lack_batch:
    want = shape_text(*ones, *tokens, "...")
    raise ValueError(
      f"{name} has an array of shape {x.shape}, which may be shared or not; want "
      f"{want} if it is shared, as from x[None]; otherwise map the call over the "
      "sequences with jax.vmap"
    )
  return with_one_batch_axis(x, x.ndim - has_batch * len(batch))


class PairProgram:
  """Wraps a traced function; two wrappers with equal printed programs are equal.

  JAX compares plain functions by identity. Suppose that a function closes over arrays,
  such as the weights of a module. Then a compiled call would keep the arrays of its
  first call. In a `PairProgram` these arrays become arguments.

  A printed program shows neither functions, such as callbacks, nor arrays that it holds
  as constants, such as those that an inner `jax.jit` closes over. So these must be the
  same objects in both programs. If the function uses `jax.custom_vjp` or
  `jax.custom_jvp`, the printed programs of the derivatives must be equal, too.
  """

  def __init__(
    self, closed: core.ClosedJaxpr, derivative: core.ClosedJaxpr | None = None
  ):
    self._jaxpr = _without_constants(closed)
    programs = [closed.jaxpr]
    self._hidden = list(_hidden_in(closed.jaxpr))
    if derivative is not None:
      programs.append(derivative.jaxpr)
      known = {id(constant) for constant in closed.consts}
      hidden = *derivative.consts, *_hidden_in(derivative.jaxpr)
      self._hidden += [x for x in hidden if id(x) not in known]
    # Functions are printed with their addresses, which differ in each trace.
    self._text = re.sub("0x[0-9a-f]+", "", "\n".join(map(str, programs)))

  def __call__(self, params: tuple[Any, list], *pair: Any) -> Array:
    own_params, constants = params
    function = core.jaxpr_as_fun(core.ClosedJaxpr(self._jaxpr, constants))
    (result,) = function(*jax.tree.leaves((own_params, *pair)))
    return result

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, PairProgram) or self._text != other._text:
      return False
    pairs = itertools.zip_longest(self._hidden, other._hidden)
    return all(mine is theirs for mine, theirs in pairs)

  def __hash__(self) -> int:
    return hash(self._text)


def _without_constants(closed: core.ClosedJaxpr) -> core.Jaxpr:
  # A Jaxpr of jax 0.12 holds constants: those of the first call would stay in memory.
  if hasattr(closed, "with_consts"):
    return closed.with_consts([None] * len(closed.consts))  # pyright: ignore
  return closed.jaxpr


def _trace_derivative(
  function: Callable, params: Any, query_position: Any, key_position: Any, *data: Any
) -> core.ClosedJaxpr:
  """Traces a function's gradient with respect to the parameters and the data.

  The rules of `jax.custom_vjp` and `jax.custom_jvp` show when this program is printed,
  but not when the program of the function is printed.
  """

  def differentiate(params, i, j, *data):
    def of_floats(params, data):
      return function(params, i, j, *data)

    number, pull_back = jax.vjp(of_floats, params, data)
    return pull_back(jnp.ones_like(number))

  return jax.make_jaxpr(differentiate)(params, query_position, key_position, *data)


def _inner_programs(equation: Any) -> Iterator[core.ClosedJaxpr | core.Jaxpr]:
  for value in equation.params.values():
    values = value if isinstance(value, tuple | list) else [value]
    for item in values:
      if isinstance(item, core.ClosedJaxpr | core.Jaxpr):
        yield item


def _hidden_in(program: core.ClosedJaxpr | core.Jaxpr) -> Iterator[Any]:
  """Yields what a printed program does not show: functions and inner constants."""
  is_closed = isinstance(program, core.ClosedJaxpr)
  jaxpr = program.jaxpr if is_closed else program
  operands = list(jaxpr.outvars)
  for equation in jaxpr.eqns:
    operands += equation.invars
    # Rules of derivatives are new in each trace: `_trace_derivative` compares them.
    if not re.match("custom_(jvp|vjp)", equation.primitive.name):
      yield from filter(callable, equation.params.values())
    for inner in _inner_programs(equation):
      yield from getattr(inner, "consts", ())
      yield from _hidden_in(inner)
  for operand in operands:  # constants, if JAX keeps them in the program
    if isinstance(operand, core.Literal) and jnp.ndim(operand.val):
      yield operand.val
