"""The Transformer: its switches, parameters and positions, padding and causality."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_close
from compiling import make_random
from flax import nnx

from relpos_jax.models.seq2seq import Transformer, TransformerConfig
from relpos_jax.nn.positions import sinusoids

TINY = TransformerConfig(
  13,
  17,
  num_layers=1,
  width=16,
  num_heads=2,
  feed_forward=24,
  max_distance=2,
  share_embeddings=False,
)
SOURCE = np.random.default_rng(0).integers(1, 13, (2, 6))
TARGET = np.random.default_rng(1).integers(1, 13, (2, 5))
tiny = functools.partial(dataclasses.replace, TINY)


@functools.cache
def shapes(config: TransformerConfig):
  """Returns the shape of every parameter by path."""
  model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  return dict(nnx.to_flat_state(nnx.state(model)))


@functools.cache
def make(config: TransformerConfig) -> Transformer:
  return make_random(lambda: Transformer(config, rngs=nnx.Rngs(0)), 0.3)


@functools.cache
def compiled(config: TransformerConfig, method: str = "__call__"):
  return jax.jit(getattr(make(config), method))


def table_paths(**changes):
  return {path for path in shapes(tiny(**changes)) if "tables" in path}


def test_tables_are_in_every_self_attention_and_nowhere_else():
  wanted = set()
  for stack in ("encoder", "decoder"):
    for layer in (0, 1):
      attention = stack, "layers", layer, "self_attention", "tables"
      wanted |= {(*attention, "key"), (*attention, "value")}
  assert table_paths(num_layers=2) == wanted


def test_tables_can_be_absent():
  assert not table_paths(positions="sinusoidal")
  assert not table_paths(positions="none")
  assert not table_paths(relative_keys=False, relative_values=False)
  assert {path[-1] for path in table_paths(relative_keys=False)} == {"value"}


def test_tables_can_be_shared():
  paths = table_paths(num_layers=3, tables_per_layer=False)
  assert len(paths) == 4
  assert {path[0] for path in paths} == {"encoder", "decoder"}


def test_shared_embeddings_are_one_matrix_and_separate_ones_three():
  def matrices(config):
    leaves = shapes(config).items()
    return sorted(leaf.shape for path, leaf in leaves if path[-1] == "table")

  assert matrices(tiny(target_vocab_size=13, share_embeddings=True)) == [(13, 16)]
  assert matrices(TINY) == [(13, 16), (17, 16), (17, 16)]


@pytest.mark.parametrize(
  "field, value, message",
  [("positions", "relativ", "positions"), ("share_embeddings", True, "vocabularies")],
)
def test_values_that_make_no_model_are_refused(field, value, message):
  config = tiny()
  object.__setattr__(config, field, value)  # bypasses the type checks of the tests
  with pytest.raises(ValueError, match=rf"{message}.*; want"):
    config.__post_init__()


NUM_MASKS = {
  "embedding_dropout_rate": 2,
  "dropout_rate": 2 + 3,
  "attention_dropout_rate": 1 + 2,
  "feed_forward_dropout_rate": 1 + 1,
}


@pytest.mark.parametrize("rate", NUM_MASKS)
def test_each_rate_of_dropout_draws_its_masks(rate):
  rates = dict.fromkeys(NUM_MASKS, 0.0) | {rate: 0.5}
  model = make(tiny(**rates))

  @jax.jit
  def count_masks(source, target):
    rngs = nnx.Rngs(dropout=jax.random.key(0))
    model(source, target, rngs)
    return rngs.dropout.count[...]

  assert count_masks(SOURCE, TARGET) == NUM_MASKS[rate]


@pytest.mark.parametrize(
  "positions, invariant", [("relative", True), ("xl", True), ("sinusoidal", False)]
)
def test_only_relative_positions_are_translation_invariant(positions, invariant):
  call = compiled(tiny(positions=positions))
  padded_left = np.pad(SOURCE, [(0, 0), (2, 0)])
  padded_right = np.pad(SOURCE, [(0, 0), (0, 2)])
  left, right = call(padded_left, TARGET), call(padded_right, TARGET)
  assert np.allclose(left, right, atol=1e-5) == invariant


@pytest.mark.parametrize("positions", ["relative", "sinusoidal"])
@pytest.mark.parametrize("stacks", ["all", "encoder", "decoder"])
def test_a_stack_without_positions_knows_no_order(positions, stacks):
  shared = {"target_vocab_size": 13, "share_embeddings": True}
  call = compiled(tiny(**shared, positions=positions, positions_in=stacks))
  logits, order = call(SOURCE, TARGET), np.array([1, 0, 2, 3, 4, 5])
  of_source = call(SOURCE[:, order], TARGET)
  assert np.allclose(of_source, logits, atol=1e-5) == (stacks == "decoder")
  # In one causal layer, later tokens attend to the earlier ones as a set.
  of_target = call(SOURCE, TARGET[:, order[:5]])
  is_same = np.allclose(of_target[:, 2:], logits[:, 2:], atol=1e-5)
  assert is_same == (stacks == "encoder")


def test_zero_beyond_the_table_is_not_clipping():
  clip = compiled(tiny(beyond="clip"), "encode")(SOURCE)
  zero = compiled(tiny(beyond="zero"), "encode")(SOURCE)
  assert jnp.abs(clip - zero).max() > 0.01


def layer_norm(x, norm):
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
  return x * norm.scale[...] + norm.bias[...]


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_without_sub_layers_the_encoder_is_its_embedding_and_norms(norm):
  model = nnx.clone(make(tiny(norm=norm, positions="sinusoidal")))
  (layer,) = model.encoder.layers
  feed_forward = layer.feed_forward.out
  for parameter in (
    layer.self_attention.out.kernel,
    feed_forward.kernel,
    feed_forward.bias,
  ):
    parameter[...] = jnp.zeros_like(parameter[...])
  norms = [model.encoder.norm]
  if norm == "post":
    norms = [residual.norm for residual in layer.residuals]
  embedded = 4 * model.source_embedding.table[...][SOURCE]
  embedded += sinusoids(jnp.arange(6), 16)
  expected = functools.reduce(layer_norm, norms, embedded)
  assert_close(jax.jit(model.encode)(SOURCE), expected, atol=1e-5)


def test_bfloat16_computes_near_float32_with_float32_parameters():
  config = tiny(dtype="bfloat16")
  assert {leaf.dtype for leaf in shapes(config).values()} == {jnp.dtype("float32")}
  assert make(config).init_cache(1, 1).layers[0].key.dtype == jnp.bfloat16
  logits, expected = compiled(config)(SOURCE, TARGET), compiled(TINY)(SOURCE, TARGET)
  assert logits.dtype == jnp.float32
  error = jnp.abs(logits - expected).max() / expected.std()
  assert 0 < error < 0.05


@pytest.mark.parametrize(
  "changes",
  [
    {"positions": "relative"},
    {"positions": "sinusoidal", "norm": "post"},
    {"positions": "both", "beyond": "zero", "tables_per_head": False},
    {"positions": "xl", "tables_per_layer": False},
  ],
  ids=str,
)
def test_hypotheses_that_branch_have_the_logits_of_the_full_pass_of_each(
  changes, monkeypatch
):
  monkeypatch.setattr("relpos_jax.nn.attention.FEWEST_SLOTS", 1)
  config, random, beam_size = tiny(**changes), np.random.default_rng(0), 3
  decode, full = compiled(config, "decode"), compiled(config)
  encoded = compiled(config, "encode_memory")(SOURCE)
  cache = make(config).init_cache(2, 5, beam_size)
  hypotheses = np.zeros((2, beam_size, 4), int)
  for t in range(4):
    tokens = random.integers(3, 17, (2, beam_size))
    hypotheses[:, :, t:] = 0
    hypotheses[:, :, t] = tokens
    logits, cache = decode(tokens, cache, encoded)
    for beam in range(beam_size):
      expected = full(SOURCE, hypotheses[:, beam])
      assert_close(logits[:, beam], expected[:, t], atol=1e-4)
    parents = random.integers(0, beam_size, (2, beam_size))
    hypotheses = np.take_along_axis(hypotheses, parents[..., None], axis=1)
    cache = cache.reorder(jnp.asarray(parents))
