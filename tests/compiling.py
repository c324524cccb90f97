"""For tests: how hard the compiler tries. Every new shape compiles, and that takes the time.

All tests compile quickly (conftest.py says so before jax starts), but for what they say of the
program itself: its memory, its text, what it rounds.
"""

import functools

import jax

# The same operations are fused and rounded as users have it; only their machine code is plain.
FUSING = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
AS_USERS_DO = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
QUICK = dict(FUSING)
if jax.__version_info__ < (0, 11):  # jax 0.12 knows the option no more, and always fuses so
  QUICK["xla_cpu_use_fusion_emitters"] = False
  FUSING["xla_cpu_use_fusion_emitters"] = AS_USERS_DO["xla_cpu_use_fusion_emitters"] = True

quickly = functools.partial(jax.jit, compiler_options=QUICK)
fusing = functools.partial(jax.jit, compiler_options=FUSING)
as_users_do = functools.partial(jax.jit, compiler_options=AS_USERS_DO)
