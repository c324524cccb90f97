"""Compiler options of the tests. Compiling every new shape takes most of their time.

Only tests that check the program itself compile as users do: its memory, its text, its
rounding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

# Fuses and rounds operations as users' programs do; only the machine code is not
# optimized.
FUSING = {
  "xla_backend_optimization_level": 0,
  "xla_llvm_disable_expensive_passes": True,
}
AS_USERS_DO = {
  "xla_backend_optimization_level": 3,
  "xla_llvm_disable_expensive_passes": False,
}
QUICK = dict(FUSING)
if jax.__version_info__ < (0, 11, 0):  # jax 0.12 has no such option, and fuses always
  FUSION = "xla_cpu_use_fusion_emitters"
  QUICK[FUSION] = False
  FUSING[FUSION] = True
  AS_USERS_DO[FUSION] = True

compile_quickly = functools.partial(jax.jit, compiler_options=QUICK)
compile_fusing = functools.partial(jax.jit, compiler_options=FUSING)
compile_as_users_do = functools.partial(jax.jit, compiler_options=AS_USERS_DO)


def fill(shapes, scale: float = 0.5):
  """Returns random arrays of these shapes, without compiling."""
  generator = np.random.default_rng(0)

  def draw(leaf):
    return jnp.asarray(scale * generator.standard_normal(leaf.shape), leaf.dtype)

  return jax.tree.map(draw, shapes)


def make_random(make, scale: float = 0.5):
  """Makes a module with random parameters, without compiling."""
  graphdef, state = nnx.split(nnx.eval_shape(make))
  return nnx.merge(graphdef, fill(state, scale))


def with_gradients(call, *arrays):
  """Returns the results of a call, and the gradients of arrays for their cosines."""
  results, pull_back = jax.vjp(call, *arrays)
  return results, pull_back(jax.tree.map(jnp.cos, results))


def run_with_gradients(call, *arrays):
  """Compiles and runs `with_gradients`."""
  return compile_quickly(functools.partial(with_gradients, call))(*arrays)


def temporary_bytes(program, *arrays):
  """Returns what a compiled function takes beside its arguments and results."""
  compiled = program.lower(*arrays).compile()
  return compiled.memory_analysis().temp_size_in_bytes
