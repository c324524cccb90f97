"""Attention on the accelerator at hand, against the reference in float64 on its host's
CPU.

The cases are those of the interpreted kernels, as many times longer as a device's tiles
are.

  pytest -m device -n4 -o addopts= -W default tests/attention/test_on_device.py
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from kernel_calls import (
  CASES,
  MORE_CASES,
  arrays_of,
  attend,
  errors,
  normal,
  output_and_gradients,
)

from relpos_jax import LinearBias, RelativePositions
from relpos_jax.attention import chunked, pallas_gpu, reference
from relpos_jax.attention.choice import IMPLEMENTATIONS

WIDTH = 64
LARGEST_ERROR = dict(float32=1e-4, bfloat16=3e-2)
ALL_CASES = CASES | MORE_CASES
# By name: its function, and how many times longer sequences are.
ATTENTIONS = {
  "pallas_gpu": (pallas_gpu.attention, 32),
  "chunked": (chunked.attention, 32),
  "projected": (reference.projected, 8),
}


def enlarge(sizes, options, factor):
  """Returns a case with about `factor` times longer lengths and distances: never whole tiles."""
  length = lambda x: np.maximum(factor * x - 1, 0)
  rows = lambda x: max(factor * (x - 1) - 5, 1)  # as odd or even as before
  left = lambda x: None if x is None else max(factor * x - 6, 0)

  def relation(x):
    if isinstance(x, LinearBias):
      return dataclasses.replace(x, slopes=x.slopes / factor)
    new = {}
    for name in ("key", "value", "table"):
      table = getattr(x, name, None)
      if table is not None:
        new[name] = normal(rows(len(table)), *table.shape[1:])
    if isinstance(x, RelativePositions):
      new = {name: normal(*table.shape[:-1], WIDTH) for name, table in new.items()}
    elif hasattr(x, "query"):
      new["query"] = normal(
        x.query.shape[0], length(x.query.shape[1]), *x.query.shape[2:]
      )
    return dataclasses.replace(x, left=left(x.left), **new)

  sizes = dict(queries=20, keys=20, rows=5) | sizes | dict(width=WIDTH)
  sizes |= {name: int(length(sizes[name])) for name in ("queries", "keys")}
  sizes |= dict(
    rows=rows(sizes["rows"]), more=tuple(map(relation, sizes.get("more", ())))
  )
  longer = dict(left=left, query_offset=lambda x: factor * x + 3)
  longer |= dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), length)
  longer["local_window_size"] = lambda window: tuple(factor * x + 3 for x in window)
  for name in ("mask", "query_segment_ids", "key_segment_ids"):
    longer[name] = lambda x: np.repeat(x, factor, axis=-1)[..., :-1]
  return sizes, {name: longer.get(name, lambda x: x)(x) for name, x in options.items()}


@pytest.mark.device
@pytest.mark.parametrize("name", ALL_CASES)
@pytest.mark.parametrize("dtype", LARGEST_ERROR)
@pytest.mark.parametrize("implementation", ATTENTIONS)
def test_error_on_the_device(implementation, dtype, name):
  """Allows eight times the largest error of the reference in the same dtype on the same device."""
  function, factor = ATTENTIONS[implementation]
  known, platform = IMPLEMENTATIONS[implementation], jax.default_backend()
  if platform != "cpu" and known.device not in (None, platform):
    pytest.skip(f"it needs a {known.device.upper()}")
  sizes, options = enlarge(*ALL_CASES[name], factor)

  def compiled(attention):
    call = functools.partial(attend, attention=attention, **options)
    return jax.jit(functools.partial(output_and_gradients, call))

  with jax.enable_x64(False), jax.default_matmul_precision("highest"):
    arrays = arrays_of(**sizes, dtype=dtype)
    if reason := attend(arrays, known.unsupported, **options):
      pytest.skip(reason)
    results = [compiled(f)(arrays) for f in (function, reference.attention)]
  with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
    arrays = jax.tree.map(lambda x: np.asarray(x, np.float64), arrays)
    wanted = compiled(reference.attention)(arrays)
  found, usual = (
    errors(result, wanted, least=0.3) for result in results
  )  # gradients may cancel
  allowed = min(8 * max(usual.values()), LARGEST_ERROR[dtype])
  print(
    jax.devices()[0].device_kind,
    f"allowed {allowed:.1e}, errors (and the reference's):",
  )
  print(*(f"{name} {x:.1e} ({usual[name]:.1e})" for name, x in found.items()), sep=", ")
  assert max(found.values()) <= allowed
