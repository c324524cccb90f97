"""For tests: a compiler that tries less hard. Every new shape compiles, and that takes the time."""

import functools

import jax

_OPTIONS = {
  "xla_backend_optimization_level": 0,
  "xla_llvm_disable_expensive_passes": True,
  "xla_cpu_use_fusion_emitters": False,
}
quickly = functools.partial(jax.jit, compiler_options=_OPTIONS)
