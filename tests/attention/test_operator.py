"""The operator's derivatives, precision and exports, and calls without tokens."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from calls import ANY_DTYPE, call, make_arrays, make_cotangent, results
from comparing import assert_close
from compiling import compile_quickly, with_gradients
from jax import export
from numpy.testing import assert_array_equal

from relpos_jax import (
  DistanceBias,
  EdgeFeatures,
  EdgeLabels,
  KeyBias,
  LinearBias,
  RelativePositions,
  attention_weights,
  dot_product_attention,
  explain,
)

OWN_VJP = "chunked", "pallas_gpu"
SIZES = {"queries": 5, "keys": 7, "heads": 4, "width": 8}
TABLE = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
RELATIONS = RelativePositions(TABLE, TABLE)


@pytest.mark.parametrize("batch, queries, keys", [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_without_queries_or_keys_there_is_nothing_or_zero(batch, queries, keys):
  query, key = jnp.ones((batch, queries, 2, 8)), jnp.ones((batch, keys, 2, 8))

  def attend(query, key, relations):
    return dot_product_attention(query, key, key, relations=relations, is_causal=True)

  for name in (None, "chunked"):
    explain(query, key, key, relations=RELATIONS, implementation=name)
  output, gradients = with_gradients(attend, query, key, RELATIONS)
  assert output.shape == query.shape
  for x in (output, *jax.tree.leaves(gradients)):
    assert_array_equal(x, jnp.zeros_like(x))
  weights = attention_weights(query, key, relations=RELATIONS)
  assert weights.shape == (batch, 2, queries, keys)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("implementation", [x for x in ANY_DTYPE if x not in OWN_VJP])
def test_it_differentiates_forward(implementation):
  """Compares the change of a weighted output with that by the gradients."""
  arrays = make_arrays(**SIZES)
  steps = jax.tree.map(jnp.sin, arrays)
  attend = functools.partial(call, implementation=implementation)
  forward = compile_quickly(lambda *arrays: jax.jvp(attend, *arrays)[1])
  change = jnp.vdot(make_cotangent(arrays), forward((arrays,), (steps,)))

  gradients = results("reference", arrays, {})
  del gradients["output"]
  changes = jax.tree.map(jnp.vdot, gradients, steps)
  assert_close(change, sum(jax.tree.leaves(changes)))


@pytest.mark.parametrize("implementation", ANY_DTYPE)
def test_gradients_keep_the_precision_of_the_call(implementation):
  @jax.jit
  def precisely(arrays):
    with jax.default_matmul_precision("highest"):
      return call(arrays, implementation=implementation)

  gradients = functools.partial(with_gradients, precisely)
  program = str(jax.make_jaxpr(gradients)(make_arrays(**SIZES, dtype=np.float32)))
  num_products = program.count("dot_general[")
  assert program.count("precision=(Precision.HIGHEST, ") == num_products > 5


OPTIONS = ["none", "positions", "zero", "pairs", "sum", "capped"]


def exported_options(name, labels, ids):
  """Returns the options of a call from labels [B, T, S] and ids [B, T]."""
  match name:
    case "none":
      return {}
    case "positions":
      return {"relations": RELATIONS}
    case "zero":
      relations = RelativePositions(TABLE, None, beyond="zero")
      dropout = {"dropout_rate": 0.3, "dropout_key": jax.random.key(0)}
      return {"relations": relations, "local_window_size": (2, 1)} | dropout
    case "pairs":
      by_label = EdgeLabels(labels, TABLE, TABLE)
      by_features = EdgeFeatures(jax.nn.one_hot(labels, 5), TABLE, TABLE)
      return {"relations": (by_label, by_features)}
    case "sum":
      by_distance = DistanceBias(TABLE[:, 0]), KeyBias(TABLE, beyond="zero")
      relations = *by_distance, LinearBias.alibi(4)
      return {"relations": relations, "bias": 0.1 * labels[:, None]}
    case "capped":
      relations = RelativePositions(None, TABLE)
      segments = {"query_segment_ids": ids // 5, "key_segment_ids": ids // 5}
      positions = {"query_positions": ids, "key_positions": ids}
      return {"relations": relations, "logits_soft_cap": 1.0} | segments | positions


# The options, the symbolic shape, and sizes that it may have.
SHAPES = [(name, "b, t", [(3, 9)]) for name in OPTIONS]
SHAPES += [("none", "2, t", [(2, 3), (2, 9)]), ("positions", "b, 4", [(2, 4), (3, 4)])]


def make_inputs(batch, length):
  random = np.random.default_rng(0)
  shapes = (batch, length, 4, 8), (batch, length, 2, 8), (batch, length, 2, 8)
  floats = [jnp.float32(random.normal(size=shape)) for shape in shapes]
  ids = jnp.arange(length) + jnp.zeros((batch, 1), jnp.int32)
  labels = jnp.asarray(random.integers(-1, 5, (batch, length, length)))
  return floats, ids, labels


def export_symbolically(attend, shape):
  batch, length = export.symbolic_shape(shape)
  one_of_each = jax.eval_shape(lambda: make_inputs(1, 1))

  def symbolic(x):
    tokens = (length,) if x.ndim == 2 else (length, *x.shape[2:])
    tokens = (length, length) if x.shape[2:] == (1,) else tokens
    return x.update(shape=(batch, *tokens))

  return export.export(compile_quickly(attend))(*jax.tree.map(symbolic, one_of_each))


@pytest.mark.parametrize("name, shape, sizes", SHAPES)
def test_programs_with_symbolic_shapes_equal_the_operator(
  name, shape, sizes, monkeypatch
):
  # To the checks of annotations a symbolic dimension is no int.
  monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)

  def attend(floats, ids, labels, implementation=None):
    options = exported_options(name, labels, ids)
    options |= {"mask": labels[:, None] != 3, "implementation": implementation}
    return dot_product_attention(*floats, is_causal=True, **options)

  @functools.partial(compile_quickly, static_argnums=0)
  def run(attend, floats, ids, labels):
    return with_gradients(lambda floats: attend(floats, ids, labels), floats)

  exported = export_symbolically(attend, shape)
  by_reference = functools.partial(attend, implementation="reference")
  for size in sizes:
    inputs = make_inputs(*size)
    assert_close(run(exported.call, *inputs), run(by_reference, *inputs), atol=1e-5)
