"""Checkpoints of an array that is cut over the devices of several processes.

  python tests/training/cut_state.py FOLDER save|restore

Saves steps 1 and 2, whose elements are their number; or prints as JSON what it restores, with the
mean over all that are kept.
"""

import json
import sys

import jax
import jax.numpy as jnp

from relpos_jax.training.checkpoint import Checkpoints
from relpos_jax.training.processes import join_processes

SIZE = 40_000


def make_state(step: int):
  mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
  cut = jax.NamedSharding(mesh, jax.P("fsdp"))
  make = lambda: dict(params=jnp.arange(SIZE, dtype=jnp.float32) * step)
  return jax.jit(make, out_shardings=cut)()


def main(folder: str, what: str) -> None:
  join_processes()
  with Checkpoints(folder, rename_damaged=True) as checkpoints:
    if what == "save":
      for step in (1, 2):
        checkpoints.save(step, make_state(step))
      return
    restored = checkpoints.restore(like=make_state(0))
    average = checkpoints.average(2, like=restored["params"])
  found = dict(element=restored["params"], average=average)
  print(json.dumps({name: float(jax.jit(jnp.max)(x)) / (SIZE - 1) for name, x in found.items()}))


if __name__ == "__main__":
  main(*sys.argv[1:])
