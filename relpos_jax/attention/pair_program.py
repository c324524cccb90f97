"""The function of a `FunctionBias` as a program, which JAX's caches can compare."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from relpos_jax.attention.relations import FunctionBias
from relpos_jax.typing import Array


class PairProgram:
  """A function of a pair that equals every other one of the same program.

  A function itself would be compared by its identity: what it reads around it, such as
  the weights of a module, would stay as at the first call.
  """

  def __init__(self, jaxpr: core.Jaxpr):
    self._jaxpr = jaxpr
    # Rules of derivatives are printed with their addresses, which differ in each trace.
    self._text = re.sub("0x[0-9a-f]+", "", str(jaxpr))

  def __call__(self, params: tuple[Any, list], *pair: Any) -> Array:
    own_params, constants = params
    function = core.jaxpr_as_fun(core.ClosedJaxpr(self._jaxpr, constants))
    (result,) = function(*jax.tree.leaves((own_params, *pair)))
    return result

  def __eq__(self, other: object) -> bool:
    return isinstance(other, PairProgram) and self._text == other._text

  def __hash__(self) -> int:
    return hash(self._text)


def as_program(relation: FunctionBias, position_dtype: np.dtype) -> FunctionBias:
  """Returns the relation with a program as its function, whose constants are parameters."""

  def of_one(data: Any, num_axes: int) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape[num_axes:], x.dtype), data)

  pair = [
    jnp.zeros((), position_dtype),
    jnp.zeros((), position_dtype),
    of_one(relation.of_query, 2),
    of_one(relation.of_key, 2),
    of_one(relation.of_pair, 3),
  ]
  # A new function: JAX would find the trace of one that it knows.
  traced = jax.make_jaxpr(lambda *arguments: relation.function(*arguments))
  closed = traced(relation.params, *pair)
  program, params = PairProgram(closed.jaxpr), (relation.params, closed.consts)
  return dataclasses.replace(relation, function=program, params=params)
