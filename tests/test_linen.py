"""The hook of Linen's layers beyond what it has in common with NNX's: tests/nn."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import filled, quickly
from flax import linen as nn
from flax import nnx, traverse_util

import relpos_jax.linen
import relpos_jax.nn
from relpos_jax.linen import RelativeAttention
from relpos_jax.nn.positions import init_table

B, T, D, N, H, K = 2, 5, 8, 2, 4, 2
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((B, T, D), dtype=np.float32)
CAUSAL = nn.make_causal_mask(jnp.ones((B, T)))


def make_layer(*, layer=nn.MultiHeadDotProductAttention, hook=None, **options):
  return layer(
    N, attention_fn=RelativeAttention(**dict(max_distance=K) | (hook or {})), **options
  )


@functools.cache
def parameters():
  return filled(jax.eval_shape(make_layer().init, jax.random.key(0), X))


def test_flax_leaves_out_no_argument_that_changes_the_result():
  own = set(inspect.signature(RelativeAttention(K)).parameters)
  flax = set(inspect.signature(nn.dot_product_attention).parameters)
  ignored = {"broadcast_dropout", "force_fp32_for_softmax"}
  assert flax - own == ignored | {
    "einsum_dot_general"
  }  # the last is never given by the layer


class InCompact(nn.Module):
  layer: type[nn.Module]

  @nn.compact
  def __call__(self, x):
    for name in ("first", "second"):
      x = make_layer(layer=self.layer, name=name)(x)
    return x


class OneForBoth(nn.Module):
  decode: bool = False

  @nn.compact
  def __call__(self, x, mask=None):
    relative = RelativeAttention(K, self_attention=True, parent=self, name="relative")
    layer = functools.partial(nn.MultiHeadDotProductAttention, N, decode=self.decode)
    for name in ("first", "second"):
      x = layer(attention_fn=relative, name=name)(x, mask=mask)
    return x


OWN = {"first/attention_fn", "second/attention_fn"}


@pytest.mark.parametrize(
  "model, owners",
  [
    (InCompact(nn.MultiHeadDotProductAttention), OWN),
    (InCompact(nn.remat(nn.MultiHeadDotProductAttention)), OWN),
    (OneForBoth(), {"relative"}),
  ],
)
def test_the_tables_have_one_path_wherever_the_hook_is_made(model, owners):
  params = jax.eval_shape(model.init, jax.random.key(0), X)["params"]
  paths = {
    path for path in traverse_util.flatten_dict(params, sep="/") if "tables" in path
  }
  assert paths == {
    f"{owner}/tables/{name}" for owner in owners for name in ("key", "value")
  }


class Stack(nn.Module):
  """Three scanned layers."""

  decode: bool = False

  @nn.compact
  def __call__(self, x, mask=None):
    step = lambda layer, x, mask: (x + layer(x, mask=mask), None)
    axes = dict(params=0, cache=0)
    scan = nn.scan(
      step, axes, split_rngs=dict(params=True), in_axes=nn.broadcast, length=3
    )
    return scan(make_layer(decode=self.decode), x, mask)[0]


MODELS = dict(
  scanned=lambda decode, at: Stack(decode),
  shared=lambda decode, at: OneForBoth(decode),
  given=lambda decode, at: make_layer(hook=dict(query_positions=at), decode=decode),
)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_decoding_equals_the_full_pass(model):
  """Decodes with scanned layers, with one hook for two, and at positions that are given."""
  variables = dict(params=model(False, None).init(jax.random.key(0), X)["params"])
  full = model(False, None).apply(variables, X, mask=CAUSAL)
  cache = model(True, None).init(jax.random.key(0), X)["cache"]

  @quickly
  def step(cache, x, at):
    return model(True, at).apply(variables | dict(cache=cache), x, mutable=["cache"])

  for t in range(T):
    y, updated = step(cache, X[:, t : t + 1], jnp.array([t]))
    np.testing.assert_allclose(y[:, 0], full[:, t], atol=1e-5)
    cache = updated["cache"]


def test_unknown_positions_are_refused():
  q, kv = jnp.ones((B, 1, N, D // N)), jnp.ones((B, T, N, D // N))
  with pytest.raises(
    ValueError, match="of 1 queries and 5 keys: set self_attention=True"
  ):
    RelativeAttention(K).init(jax.random.key(0), q, kv, kv)


def test_a_layer_of_the_other_kind_is_refused():
  own = relpos_jax.nn.RelativeAttention(K, H, rngs=nnx.Rngs(0))
  with pytest.raises(
    TypeError, match=r"not train its tables: give it relpos_jax\.linen\.Rel"
  ):
    nn.MultiHeadDotProductAttention(N, attention_fn=own).init(jax.random.key(0), X)
  options = dict(attention_fn=RelativeAttention(K), decode=False, rngs=nnx.Rngs(0))
  with pytest.raises(
    TypeError, match=r"give an NNX layer relpos_jax\.nn\.RelativeAttention"
  ):
    nnx.MultiHeadAttention(N, D, **options)(jnp.asarray(X))


def test_other_einsums_are_refused():
  layer = make_layer(qk_attn_weights_einsum_cls=lambda: jnp.einsum)
  with pytest.raises(
    NotImplementedError, match=r"qk_attn_weights_einsum is .* wants None"
  ):
    layer.apply(parameters(), X)


@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGHEST])
def test_precision_is_that_of_every_product(precision):
  x = jnp.concatenate(
    [X, X], axis=1
  )  # few queries would have lookups by products of their own

  def program(precision):
    return str(jax.make_jaxpr(make_layer(precision=precision).apply)(parameters(), x))

  num_products = program(None).count("dot_general[")
  assert "Precision" not in program(None)
  assert program(precision).count("precision=(Precision.HIGHEST") == num_products
  with jax.default_matmul_precision("high"):
    assert program(None).count("precision=(Precision.HIGH,") == num_products


@pytest.mark.parametrize(
  "partition", [nn.with_partitioning, nn.with_logical_partitioning]
)
def test_axes_of_tables_have_names(partition):
  layer = make_layer(hook=dict(table_init=partition(init_table, (None, "width"))))
  boxed = layer.init(jax.random.key(0), X)
  unboxed = nn.meta.unbox(boxed)
  specs = nn.get_partition_spec(boxed)["params"]["attention_fn"]["tables"]
  assert specs == dict.fromkeys(("key", "value"), jax.P(None, "width"))
  for variables in (boxed, unboxed):
    np.testing.assert_array_equal(
      layer.apply(variables, X), make_layer().apply(unboxed, X)
    )
