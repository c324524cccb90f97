"""Attention on the accelerator at hand, against the reference on its host in float64.

The cases are those of the interpreted kernels, as many times longer as a device's tiles
are.

  pytest -m device -n4 -o addopts= -W default tests/attention/test_on_device.py
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from attention_cases import CASES, MORE_CASES
from calls import attend, make_arrays, normal, output_and_gradients
from comparing import relative_errors

from relpos_jax import ContentBias, LinearBias, RelativePositions
from relpos_jax.attention import chunked, mosaic_gpu, pallas_gpu, reference
from relpos_jax.attention.choice import IMPLEMENTATIONS

WIDTH = 64
LARGEST_ERROR = {"float32": 1e-4, "bfloat16": 3e-2}
ALL_CASES = CASES | MORE_CASES
# By name: its function, and how many times longer sequences are.
ATTENTIONS = {
  "mosaic_gpu": (mosaic_gpu.attention, 32),
  "pallas_gpu": (pallas_gpu.attention, 32),
  "chunked": (chunked.attention, 32),
  "projected": (reference.projected, 8),
}


@dataclasses.dataclass
class Enlarged:
  """Makes cases with about `factor` times longer lengths, never whole tiles."""

  factor: int

  def length(self, x):
    return np.maximum(self.factor * x - 1, 0)

  def rows(self, x):
    return max(self.factor * (x - 1) - 5, 1)  # as odd or even as before

  def left(self, x):
    return None if x is None else max(self.factor * x - 6, 0)

  def relation(self, relation):
    if isinstance(relation, LinearBias):
      return dataclasses.replace(relation, slopes=relation.slopes / self.factor)
    fields = {"left": self.left(relation.left)}
    for name in {"key", "value", "table"} & vars(relation).keys():
      table = getattr(relation, name)
      if table is not None:
        is_vector = isinstance(relation, RelativePositions)
        row = (*table.shape[1:-1], WIDTH) if is_vector else table.shape[1:]
        fields[name] = normal(self.rows(len(table)), *row)
    if isinstance(relation, ContentBias):
      batch, queries, *vector = relation.query.shape
      fields["query"] = normal(batch, self.length(queries), *vector)
    return dataclasses.replace(relation, **fields)

  def sizes(self, sizes):
    more = tuple(map(self.relation, sizes.get("more", ())))
    rows = self.rows(sizes.get("rows", 5))
    larger = {"rows": rows, "more": more, "width": WIDTH}
    for name in ("queries", "keys"):
      larger[name] = int(self.length(sizes.get(name, 20)))
    return sizes | larger

  def option(self, name, x):
    match name:
      case "left":
        return self.left(x)
      case "query_offset":
        return self.factor * x + 3
      case "query_seq_lengths" | "key_value_seq_lengths":
        return self.length(x)
      case "local_window_size":
        return tuple(self.factor * side + 3 for side in x)
      case "mask" | "query_segment_ids" | "key_segment_ids":
        return np.repeat(x, self.factor, axis=-1)[..., :-1]
      case _:
        return x


def run(attention, arrays, options):
  call = functools.partial(attend, attention=attention, **options)
  return jax.jit(functools.partial(output_and_gradients, call))(arrays)


@pytest.mark.device
@pytest.mark.parametrize("name", ALL_CASES)
@pytest.mark.parametrize("dtype", LARGEST_ERROR)
@pytest.mark.parametrize("implementation", ATTENTIONS)
def test_error_on_the_device(implementation, dtype, name):
  """Allows eight times the reference's largest error on the device, in its dtype."""
  function, factor = ATTENTIONS[implementation]
  known, platform = IMPLEMENTATIONS[implementation], jax.default_backend()
  if platform != "cpu" and known.device not in (None, platform):
    pytest.skip(f"it needs a {known.device.upper()}")
  sizes, options = ALL_CASES[name]
  enlarged = Enlarged(factor)
  options = {option: enlarged.option(option, x) for option, x in options.items()}
  with jax.enable_x64(False), jax.default_matmul_precision("highest"):
    arrays = make_arrays(**enlarged.sizes(sizes), dtype=dtype)
    reason = attend(arrays, known.unsupported, **options)
    if reason:
      pytest.skip(reason)
    actual = run(function, arrays, options)
    by_reference = run(reference.attention, arrays, options)
  with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
    exact_arrays = jax.tree.map(lambda x: np.asarray(x, np.float64), arrays)
    wanted = run(reference.attention, exact_arrays, options)
  errors = relative_errors(actual, wanted, least=0.3)  # gradients may cancel
  usual = relative_errors(by_reference, wanted, least=0.3)
  allowed = min(8 * max(usual.values()), LARGEST_ERROR[dtype])
  print(f"{jax.devices()[0].device_kind} allowed {allowed:.1e}; and the reference's:")
  for array, error in errors.items():
    print(f"{array} {error:.1e} ({usual[array]:.1e})")
  assert max(errors.values()) <= allowed
