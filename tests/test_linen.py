"""The hook of Linen's layers beyond what it has in common with NNX's: tests/nn."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_same
from compiling import fill
from flax import linen as nn
from flax import nnx, traverse_util
from flax_layers import check_linen_decoding

import relpos_jax.linen
import relpos_jax.nn
from relpos_jax.linen import RelativeAttention
from relpos_jax.nn.positions import init_table

B, T, D, N, H, K = 2, 5, 8, 2, 4, 2
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((B, T, D), dtype=np.float32)
CAUSAL = nn.make_causal_mask(jnp.ones((B, T)))
KEY = jax.random.key(0)


def make_layer(*, layer=nn.MultiHeadDotProductAttention, hook=None, **options):
  attention_fn = RelativeAttention(K, **hook or {})
  return layer(N, attention_fn=attention_fn, **options)


@functools.cache
def parameters():
  return fill(jax.eval_shape(make_layer().init, KEY, X))


def test_flax_leaves_out_no_argument_that_changes_the_result():
  own = set(inspect.signature(RelativeAttention(K)).parameters)
  flax = set(inspect.signature(nn.dot_product_attention).parameters)
  ignored = {"broadcast_dropout", "force_fp32_for_softmax"}
  never_given = {"einsum_dot_general"}
  assert flax - own == ignored | never_given


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


OWN = ["first/attention_fn", "second/attention_fn"]
REMAT = nn.remat(nn.MultiHeadDotProductAttention)


@pytest.mark.parametrize(
  "model, owners",
  [
    (InCompact(nn.MultiHeadDotProductAttention), OWN),
    (InCompact(REMAT), OWN),
    (OneForBoth(), ["relative"]),
  ],
  ids=["in compact", "remat", "one for both"],
)
def test_the_tables_have_one_path_wherever_the_hook_is_made(model, owners):
  params = jax.eval_shape(model.init, KEY, X)["params"]
  paths = [x for x in traverse_util.flatten_dict(params, sep="/") if "tables" in x]
  wanted = []
  for owner in owners:
    wanted += [f"{owner}/tables/key", f"{owner}/tables/value"]
  assert sorted(paths) == wanted


class Stack(nn.Module):
  """Three scanned layers."""

  decode: bool = False

  @nn.compact
  def __call__(self, x, mask=None):
    def step(layer, x, mask):
      return x + layer(x, mask=mask), None

    axes, rngs = {"params": 0, "cache": 0}, {"params": True}
    scan = nn.scan(step, axes, split_rngs=rngs, in_axes=nn.broadcast, length=3)
    return scan(make_layer(decode=self.decode), x, mask)[0]


# Functions of `decode` and of the positions of queries.
MODELS = {
  "scanned": lambda decode, at: Stack(decode),
  "shared": lambda decode, at: OneForBoth(decode),
  "given": lambda decode, at: make_layer(hook={"query_positions": at}, decode=decode),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_decoding_equals_the_full_pass(make):
  """Decodes with scanned layers, with one hook for two, and at positions given."""
  model = make(False, None)
  params = fill(jax.eval_shape(model.init, KEY, X)["params"])
  full = model.apply({"params": params}, X, mask=CAUSAL)
  check_linen_decoding(functools.partial(make, True), params, X, full)


def test_unknown_positions_are_refused():
  query, key = jnp.ones((B, 1, N, H)), jnp.ones((B, T, N, H))
  message = "of 1 queries and 5 keys: set self_attention=True"
  with pytest.raises(ValueError, match=message):
    RelativeAttention(K).init(KEY, query, key, key)


def test_hooks_for_the_other_kind_of_layer_are_refused():
  hook = relpos_jax.nn.RelativeAttention(K, H, rngs=nnx.Rngs(0))
  message = r"not train its tables: give it relpos_jax\.linen\.Rel"
  with pytest.raises(TypeError, match=message):
    nn.MultiHeadDotProductAttention(N, attention_fn=hook).init(KEY, X)
  options = {"attention_fn": RelativeAttention(K), "decode": False}
  layer = nnx.MultiHeadAttention(N, D, **options, rngs=nnx.Rngs(0))
  message = r"give an NNX layer relpos_jax\.nn\.RelativeAttention"
  with pytest.raises(TypeError, match=message):
    layer(jnp.asarray(X))


def test_other_einsums_are_refused():
  layer = make_layer(qk_attn_weights_einsum_cls=lambda: jnp.einsum)
  message = r"qk_attn_weights_einsum is .* wants None"
  with pytest.raises(NotImplementedError, match=message):
    layer.apply(parameters(), X)


@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGHEST])
def test_precision_is_that_of_every_product(precision):
  # Few queries would have lookups by products of their own.
  x = jnp.concatenate([X, X], axis=1)

  def program(precision):
    return str(jax.make_jaxpr(make_layer(precision=precision).apply)(parameters(), x))

  default = program(None)
  num_products = default.count("dot_general[")
  assert "Precision" not in default
  assert program(precision).count("precision=(Precision.HIGHEST") == num_products
  with jax.default_matmul_precision("high"):
    assert program(None).count("precision=(Precision.HIGH,") == num_products


@pytest.mark.parametrize(
  "partition", [nn.with_partitioning, nn.with_logical_partitioning]
)
def test_axes_of_tables_have_names(partition):
  layer = make_layer(hook={"table_init": partition(init_table, (None, "width"))})
  boxed = layer.init(KEY, X)
  unboxed = nn.meta.unbox(boxed)
  specs = nn.get_partition_spec(boxed)["params"]["attention_fn"]["tables"]
  assert specs == dict.fromkeys(("key", "value"), jax.P(None, "width"))
  wanted = make_layer().apply(unboxed, X)
  assert_same(layer.apply(boxed, X), wanted)
  assert_same(layer.apply(unboxed, X), wanted)
