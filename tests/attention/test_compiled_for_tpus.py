"""Attention compiled for TPUs that are not there.

pip install -e '.[tpu,test]' && pytest -m tpu -n0
"""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alphagenome_attention import apply_original, parameter_shapes
from calls import make_shapes
from compiling import temporary_bytes, with_gradients
from jax.experimental import topologies
from jax.sharding import (
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
  SingleDeviceSharding,
  use_abstract_mesh,
)
from published_page import page

from experiments.plan import NO_TPU
from relpos_jax import RelativePositions, dot_product_attention

CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}
pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("tpu_compiler")]


@pytest.fixture(scope="module")
def tpu_compiler():
  pytest.importorskip("libtpu")
  jax.config.update("jax_platforms", "cpu")
  os.environ.update(NO_TPU)


def compile_with_gradients(implementation, *arrays):
  """Returns the text of the program for query, key, value and relations."""

  def attend(query, key, value, relations):
    options = {"is_causal": True, "implementation": implementation}
    return dot_product_attention(query, key, value, relations=relations, **options)

  compiled = jax.jit(lambda *arrays: with_gradients(attend, *arrays))
  return compiled.lower(*arrays).compile().as_text()


@pytest.mark.parametrize("implementation", ["chunked", "projected"])
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles(chip, implementation):
  topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
  sharding = SingleDeviceSharding(topology.devices[0])
  text = compile_with_gradients(implementation, *make_shapes(1024, sharding=sharding))
  if implementation == "chunked":
    assert "1024,1024]" not in text


def test_projected_holds_the_weights_once():
  """On a CPU the same products are written without an axis of size 1."""
  topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS["v5e"])
  mesh = Mesh(np.array(topology.devices[:1]), "data")
  sharding = NamedSharding(mesh, PartitionSpec())
  x = jax.ShapeDtypeStruct((8, 512, 8, 64), jnp.bfloat16, sharding=sharding)
  table = jax.ShapeDtypeStruct((33, 64), jnp.bfloat16, sharding=sharding)
  relations = RelativePositions(table, table)

  @jax.jit
  def attend(x, relations):
    return dot_product_attention(x, x, x, relations=relations)

  with use_abstract_mesh(mesh.abstract_mesh):
    used = temporary_bytes(attend, x, relations)
  weights = 4 * 8 * 8 * 512**2
  assert used < 1.1 * weights


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_no_chip_gathers_what_the_heads_shard(kind):
  names = ("fsdp", "tp") if kind == AxisType.Auto else ("rows", "megatron")
  topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS["v5e"])
  mesh = Mesh(np.array(topology.devices).reshape(2, 2), names, axis_types=(kind,) * 2)

  def shape(dtype, sizes, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

  x = shape(jnp.bfloat16, (4, 1024, 8, 64), names[0], None, names[1])
  table = shape(jnp.float32, (33, 64))
  with use_abstract_mesh(mesh.abstract_mesh):
    text = compile_with_gradients("chunked", x, x, x, RelativePositions(table, table))
  assert not re.search(r"(all-gather|all-to-all|collective-permute)(-start)?\(", text)


def compile_alphagenome(attend, num_layers=9, width=1536, channels=128):
  """Compiles attention at 1 Mb, with gradients, for a chip of 16 GB."""
  topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS["v5e"])
  sharding = SingleDeviceSharding(topology.devices[0])

  def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=sharding)

  def apply(layers, x, pairs):
    for w in layers:
      x = x + attend(w, x, pairs)
    return x

  parameters = parameter_shapes(width, channels)
  layer = {name: shape(*sizes) for name, sizes in parameters.items()}
  inputs = shape(1, 8192, width), shape(1, 512, 512, channels)
  call = jax.jit(lambda *x: with_gradients(apply, *x))
  return call.lower([layer] * num_layers, *inputs).compile()


def test_nine_layers_of_alphagenome_fit_a_chip():
  compiled = compile_alphagenome(page().alphagenome)
  used = compiled.memory_analysis()
  total = used.temp_size_in_bytes + used.argument_size_in_bytes
  assert total + used.output_size_in_bytes < 6e9  # 5.7e9
  assert "8192,8192]" not in compiled.as_text()


def test_nine_layers_of_the_original_alphagenome_do_not():
  pytest.importorskip("alphagenome_research")
  with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
    compile_alphagenome(apply_original)  # 26 GiB
