"""The training step: devices, microbatches and padding do not matter; a bad step is left out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiling import filled
from flax import nnx

from configs import default
from experiments.data.batching import Batch
from experiments.data.tokenizer import EOS, PAD
from experiments.graphs.graph import Graph, GraphBatches
from experiments.graphs.task import Graphs
from experiments.training.sharding import make_mesh, put_batch, put_parameters
from experiments.training.step import (
  TrainState,
  compiling_ahead,
  init_state,
  inverse_sqrt,
  make_eval_step,
  make_train_step,
  naming_attention,
)
from experiments.training.task import cross_entropy
from experiments.translation import task as translation_task
from experiments.translation.task import Translation
from relpos_jax.models.graph_encoder import GraphEncoder, GraphEncoderConfig
from relpos_jax.models.seq2seq import Transformer, TransformerConfig

RATES = (
  "dropout_rate",
  *(f"{of}_dropout_rate" for of in ("embedding", "attention", "feed_forward")),
)
DROPOUT = dict.fromkeys(RATES, 0.1)
CONFIG = dict(num_layers=1, width=16, num_heads=2, feed_forward=32, max_distance=2)
ADAM = optax.adam(inverse_sqrt(0.02, 50), b2=0.98, eps=1e-9)
SGD = optax.sgd(1.0)  # the parameters lose exactly the gradient

smoothed = Translation(default.get_config()).loss
config = default.get_config()
config.training.label_smoothing = 0.0
loss = Translation(config).loss


def make_model(**dropout):
  config = TransformerConfig(12, 12, **CONFIG, **dropout)
  return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))


def start(optimizer, num_devices: int = 1) -> TrainState:
  params = filled(make_model()[1], 0.2)
  return put_parameters(init_state(params, optimizer), make_mesh(num_devices))


def copy_task(step: int) -> Batch:
  generator = np.random.default_rng(step)
  tokens = generator.integers(4, 12, (8, 8))
  lengths = generator.integers(1, 8, (8, 1))
  place = np.arange(8)
  rows = np.where(place < lengths, tokens, np.where(place == lengths, EOS, PAD)).astype(np.int32)
  return Batch(rows, rows)


# --- gradients, without dropout -------------------------------------------------------------------

STILL, _ = make_model(**dict.fromkeys(DROPOUT, 0.0))


def make_sgd_step(num_microbatches: int):
  return make_train_step(STILL, loss, SGD, num_microbatches=num_microbatches)


@pytest.fixture(scope="module")
def sgd_step():
  return make_sgd_step(1)


@pytest.fixture(scope="module")
def eval_step():
  return make_eval_step(STILL, loss)


def gradient(step, batch: Batch):
  old = [np.array(leaf) for leaf in jax.tree.leaves(start(SGD).params)]
  new, metrics = step(start(SGD), batch)
  pairs = zip(old, jax.tree.leaves(new.params), strict=True)
  return np.concatenate([np.ravel(a - b) for a, b in pairs]), jax.device_get(metrics)


def test_metrics_are_of_the_gradient_and_the_batch(sgd_step, eval_step):
  batch = copy_task(0)
  grads, metrics = gradient(sgd_step, batch)
  assert metrics["num_tokens"] == (batch.target != PAD).sum()
  assert metrics["grad_norm"] == pytest.approx(np.linalg.norm(grads), rel=1e-4)
  loss = eval_step(start(SGD).params, batch)
  assert loss.num_tokens == metrics["num_tokens"]
  assert metrics["loss"] == pytest.approx(float(loss.sum) / int(loss.num_tokens), rel=1e-5)


def test_the_learning_rate_is_that_of_the_optimizer():
  rates = inverse_sqrt(0.02, 3)
  optimizer = optax.adam(rates, b2=0.98, eps=1e-9)
  step = make_train_step(STILL, loss, optimizer, schedule=rates)
  state = start(optimizer)
  for number, count in enumerate((0, 1, 1, 2)):  # the optimizer does not count a skipped step
    params = jax.tree.map(jnp.copy, state.params)
    if number == 1:
      state = state._replace(params=jax.tree.map(lambda x: x * jnp.nan, params))
    state, metrics = step(state, copy_task(number))
    np.testing.assert_allclose(metrics["learning_rate"], rates(count), rtol=1e-6)
    assert metrics["skipped"] == (number == 1)
    if number == 1:
      state = state._replace(params=params)


def test_a_step_is_compiled_once_for_each_shape_whether_ahead_or_not(monkeypatch):
  mesh, programs = make_mesh(1), []
  listen = lambda event, seconds, fun_name="", **_: programs.append((event, fun_name))
  monitoring = jax.monitoring
  batches = [jax.tree.map(lambda x, n=n: x[:n], copy_task(0)) for n in (2, 4, 8)]
  monitoring.register_event_duration_secs_listener(listen)
  try:
    with jax.set_mesh(mesh), compiling_ahead() as compiler:
      batches, state = [put_batch(batch, mesh) for batch in batches], start(SGD)
      shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
      )
      step = naming_attention(make_sgd_step(1), compiler, shapes, batches[:2])
      for batch in (*batches, *batches):
        state, _ = step(state, batch)
  finally:
    monitoring.unregister_event_duration_listener(listen)
  compiled = [name for event, name in programs if event.endswith("backend_compile_duration")]
  assert sum("train_step" in name for name in compiled) == 3


def test_microbatches_sum_to_the_gradient_of_the_batch_though_one_is_padding(sgd_step):
  batch = copy_task(0)
  for side in batch:
    side[3::4] = PAD
  whole, metrics = gradient(sgd_step, batch)
  parts, metrics_of_parts = gradient(make_sgd_step(4), batch)
  np.testing.assert_allclose(parts, whole, atol=1e-5)
  assert np.abs(whole).max() > 0.01
  for name in metrics:
    np.testing.assert_allclose(metrics_of_parts[name], metrics[name], rtol=1e-5)


def test_microbatches_of_graphs_without_features_sum_to_the_gradient_of_the_batch():
  graphs = [Graph.of([0, 1, 0], [(0, 1, 2), (2, 1, label)], target=label % 2) for label in range(3)]
  batch = GraphBatches(graphs, boundaries=(4,), budget=16, seed=0)[0]
  layers = dict(num_layers=1, width=8, num_heads=2, feed_forward=8, dropout_rate=0.0)
  layers |= dict(embedding_dropout_rate=0.0)
  config = GraphEncoderConfig(num_node_labels=2, num_edge_labels=3, num_classes=2, **layers)
  graphdef, params = nnx.split(nnx.jit(lambda: GraphEncoder(config, rngs=nnx.Rngs(0)))())
  after = []
  for number in (1, 2):
    of_graphs = Graphs(default.get_config("graphs")).loss
    step = make_train_step(graphdef, of_graphs, SGD, num_microbatches=number)
    state = init_state(jax.tree.map(jnp.copy, params), SGD)
    after.append(step(state, put_batch(batch, make_mesh(1)))[0].params)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), *after)


# --- steps that are not finite --------------------------------------------------------------------

SPOILT = 3  # the step whose batch has one bad token


def spoil(batch: Batch) -> Batch:
  target = batch.target.copy()
  target[5, 0] = 11
  return batch._replace(target=target)


def spoilt_loss(value: float):
  def loss(logits, targets, **options):
    factor = jnp.where(targets == 11, value, 1.0)[..., None]
    return cross_entropy(logits * factor, targets, **options)

  return loss


@pytest.mark.parametrize("num_devices, num_microbatches, value", [(8, 1, np.inf), (1, 4, np.nan)])
def test_a_step_that_is_not_finite_is_as_if_left_out(
  num_devices, num_microbatches, value, monkeypatch
):
  monkeypatch.setattr(translation_task.tasks, "cross_entropy", spoilt_loss(value))
  options = dict(num_microbatches=num_microbatches)
  train_step = make_train_step(make_model(**DROPOUT)[0], smoothed, ADAM, **options)
  mesh = make_mesh(num_devices)
  skipping, leaving_out = start(ADAM, num_devices), start(ADAM, num_devices)
  for step in range(6):
    batch = copy_task(step)
    batch = Batch(*(np.where(side == 11, 10, side) for side in batch))
    if step == SPOILT:
      leaving_out = put_parameters(leaving_out._replace(step=leaving_out.step + 1), mesh)
      batch = spoil(batch)
    else:
      leaving_out, _ = train_step(leaving_out, put_batch(batch, mesh))
    skipping, metrics = train_step(skipping, put_batch(batch, mesh))
    assert int(metrics["skipped"]) == (step == SPOILT)
    assert np.isfinite(float(metrics["loss"]) + float(metrics["grad_norm"])) == (step != SPOILT)
  jax.tree.map(np.testing.assert_array_equal, skipping, leaving_out)
  assert train_step._cache_size() == 1
  assert int(skipping.step) == 6 and np.isfinite(jax.tree.leaves(skipping.params)[0]).all()
