"""The choice of an implementation, its reasons, and what each one refuses."""

import functools
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from absent_devices import target
from jax import export
from jax.sharding import AbstractDevice
from ones import KEY, QUERY, RELATIONS, TABLE, call

from relpos_jax import (
  ContentBias,
  EdgeLabels,
  KeyBias,
  LinearBias,
  RelativePositions,
  explain,
)
from relpos_jax.attention import partitioned

CONTENT = ContentBias(np.ones((2, 5, 4, 3), np.float32), TABLE[:, :3])
LABELLED = RELATIONS, EdgeLabels(np.arange(35).reshape(5, 7) % 5, TABLE, None)
WITH_SLOPES = RELATIONS, LinearBias.alibi(4)
POSITIONS = {"query_positions": np.arange(5)}
WIDE = np.ones((1, 6, 1, 300), np.float32)
MASK = np.ones((1, 1, 5, 1), bool)


NEEDS_NO_POSITIONS = "positions or query_offset are given; it needs"
WIDE_HEADS = {"query": WIDE, "key": WIDE, "value": WIDE, "relations": None}
OTHER_VALUES = {"value": KEY[..., :4], "relations": RelativePositions(TABLE, None)}


@pytest.mark.parametrize(
  "name, change, reason",
  [
    ("skew", POSITIONS, "positions are given; if they are consecutive, give query_o"),
    ("skew", {"relations": LABELLED}, "it takes no EdgeLabels"),
    ("pallas_gpu", WIDE_HEADS, "heads have width 300"),
    ("pallas_gpu", {"bias": np.ones((1, 1, 5, 7))}, "a bias is given"),
    ("pallas_gpu", {"mask": MASK}, "mask has shape (1, 1, 5, 1)"),
    ("pallas_gpu", POSITIONS, NEEDS_NO_POSITIONS),
    ("pallas_gpu", {"query_offset": np.array([1, 2])}, NEEDS_NO_POSITIONS),
    ("pallas_gpu", {"query_offset": 3}, NEEDS_NO_POSITIONS),
    ("pallas_gpu", {"relations": LABELLED}, "it takes no EdgeLabels"),
    ("pallas_gpu", {"relations": KeyBias(TABLE)}, "it takes no KeyBias"),
    ("pallas_gpu", {"relations": CONTENT}, "it takes no ContentBias"),
    ("pallas_gpu", {"relations": WITH_SLOPES}, "it takes no LinearBias"),
    ("pallas_gpu", {"local_window_size": 3}, "a local window is given"),
    ("pallas_gpu", {"logits_soft_cap": 1.0}, "a soft cap is given"),
    ("pallas_gpu", {"sinks": np.ones(4, "f4")}, "sinks are given"),
    ("pallas_gpu", {"return_residual": True}, "sinks are given, or a residual"),
    ("pallas_gpu", OTHER_VALUES, "values have width 4; it needs the keys' width, 8"),
    ("pallas_gpu", {"scale": jnp.float32(0.1)}, "scale is traced"),
  ],
)
def test_what_an_implementation_cannot_do_it_refuses_with_the_reason_that_explain_gives(
  name, change, reason
):
  default = {"query": QUERY, "key": KEY, "value": KEY, "relations": RELATIONS}
  arguments = default | change
  arrays = [arguments.pop(array) for array in ("query", "key", "value")]
  static = "local_window_size", "logits_soft_cap", "return_residual", "implementation"
  compiled = jax.jit(call, static_argnames=static)
  message = f"'{name}' cannot .*{re.escape(reason)}"
  with pytest.raises(NotImplementedError, match=message):
    compiled(*arrays, **arguments, implementation=name)
  assert explain(*arrays, **arguments).reasons[name].startswith(reason)


@pytest.mark.parametrize(
  "platform, shape, table_shape, wanted",
  [
    ("cpu", (32, 32, 4, 32), (33, 32), "per_position"),
    ("cpu", (32, 32, 4, 32), (33, 4, 32), "per_position"),
    ("cpu", (32, 32, 8, 64), (33, 8, 64), "projected"),
    ("cpu", (16, 128, 8, 64), (33, 64), "projected"),
    ("cpu", (32, 128, 8, 64), (33, 64), "chunked"),
    ("cpu", (1024, 64, 8, 64), (33, 8, 64), "per_position"),
    ("cpu", (16, 96, 8, 64), (33, 64), "per_position"),
    ("cpu", (1, 512, 8, 64), (33, 64), "chunked"),
    ("tpu", (64, 1024, 8, 64), (33, 64), "projected"),
    ("tpu", (64, 2048, 8, 64), (33, 64), "chunked"),
    ("cuda", (64, 1024, 8, 64), (33, 64), "projected"),
    ("cuda", (64, 2048, 8, 64), (33, 64), "chunked"),
  ],
)
def test_the_choice_follows_the_measurements_on_the_platform_of_the_mesh(
  platform, shape, table_shape, wanted
):
  array = jax.ShapeDtypeStruct(shape, jnp.float32)
  table = jax.ShapeDtypeStruct(table_shape, jnp.float32)
  relations = RelativePositions(table, table)
  with target(platform):
    choice = explain(array, array, array, relations=relations)
  assert choice.implementation == wanted
  may_be_named = "if implementation= names it" in choice.reasons["pallas_gpu"]
  assert may_be_named == (platform in ("gpu", "cuda"))


@pytest.mark.parametrize(
  "batch, length, num_rows, has_positions, wanted",
  [
    (16, 40, 4095, True, "per_position"),
    (1024, 40, 4095, True, "per_position"),
    (16, 128, 4095, True, "per_position"),
    (64, 128, 4095, True, "chunked"),  # the weights are large
    (4, 128, 4095, True, "projected"),  # the vectors are larger than the weights
    (16, 128, 255, True, "projected"),
    (16, 128, 4095, False, "projected"),  # it leaves out rows that no pair has
  ],
)
@pytest.mark.parametrize("kind", [ContentBias, KeyBias, RelativePositions])
def test_the_vectors_of_tables_with_more_rows_than_keys_are_gathered(
  kind, batch, length, num_rows, has_positions, wanted
):
  x = jax.ShapeDtypeStruct((batch, length, 8, 8), jnp.float32)
  table = jax.ShapeDtypeStruct((num_rows, 8, 8), jnp.float32)
  arrays = {
    ContentBias: (x, table),
    KeyBias: (table,),
    RelativePositions: (table, None),
  }
  options = {"relations": kind(*arrays[kind])}
  if has_positions:
    at = jax.ShapeDtypeStruct((length,), jnp.int32)
    options |= {"query_positions": at, "key_positions": at}
  with target("cpu"):
    assert explain(x, x, x, **options).implementation == wanted


@pytest.mark.parametrize("length, wanted", [(64, "projected"), (2048, "chunked")])
def test_without_relations_long_sequences_are_in_tiles(length, wanted):
  """Covers rotary positions, which are no relation."""
  array = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)
  with target("cpu"):
    assert explain(array, array, array).implementation == wanted


ONE_MASK = jax.ShapeDtypeStruct((1, 1, 1, 2048), bool)


def choose_on_gpu(
  kind="NVIDIA H200",
  devices=1,
  batch=8,
  length=1024,
  width=64,
  rows=33,
  dtype=jnp.bfloat16,
  is_causal=True,
  **options,
):
  x = jax.ShapeDtypeStruct((batch, length, 8, width), dtype)
  table = jax.ShapeDtypeStruct((rows, width), dtype)
  relations = RelativePositions(table, table) if rows else None
  with target("cuda", kind, devices):
    choice = explain(x, x, x, relations=relations, is_causal=is_causal, **options)
  return choice.implementation


@pytest.mark.parametrize(
  "change, wanted",
  [
    ({}, "pallas_gpu"),
    ({"rows": 0}, "pallas_gpu"),
    ({"rows": 0, "length": 2048}, "cudnn"),
    ({"rows": 0, "length": 2048, "batch": 4, "local_window_size": 64}, "jax.nn"),
    ({"rows": 0, "length": 2048, "mask": ONE_MASK}, "pallas_gpu"),
    ({"rows": 0, "length": 2048, "batch": 4, "kind": "NVIDIA A100"}, "jax.nn"),
    ({"rows": 33, "length": 2048}, "pallas_gpu"),
    ({"kind": "NVIDIA A100"}, "projected"),
    ({"devices": 8}, "projected"),
    ({"dtype": jnp.float32}, "projected"),
    ({"length": 512}, "projected"),
    ({"rows": 129}, "projected"),  # a band that is wide for this length
    ({"width": 128}, "projected"),
    ({"batch": 4096, "length": 2048, "rows": 201}, "chunked"),  # more than 1 GiB
    ({"is_causal": False}, "projected"),
    ({"logits_soft_cap": 9.0}, "projected"),
  ],
  ids=str,
)
def test_a_kernel_is_chosen_where_it_was_timed(change, wanted):
  assert choose_on_gpu(**change) == wanted


def test_the_default_device_is_the_target(monkeypatch):
  cpu = jax.devices()[0]
  gpu = AbstractDevice(device_kind="A", num_cores=None, platform="cuda")
  monkeypatch.setattr(jax, "devices", lambda *_: [gpu])
  assert partitioned.target_platform() == "gpu"
  with jax.default_device(cpu):
    assert partitioned.target_platform() == "cpu"


def test_explain_names_what_cannot_have_symbolic_shapes(monkeypatch):
  # To the checks of annotations a symbolic dimension is no int.
  monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
  query = jax.ShapeDtypeStruct(export.symbolic_shape("b, t, 4, 8"), jnp.float32)
  explanation = explain(query, query, query, relations=RELATIONS)
  assert explanation.implementation == "projected"
  for name in ("skew", "chunked", "pallas_gpu"):
    assert explanation.reasons[name] == "a dimension is symbolic; it needs numbers"


def test_numpy_numbers_are_explained_like_those_of_python():
  numbers = {"scale": 0.125, "dropout_rate": 0.1, "logits_soft_cap": 50.0}
  key = {"dropout_key": jax.random.key(0)}
  wanted = explain(QUERY, KEY, KEY, **numbers, **key)
  numbers = {name: np.float64(number) for name, number in numbers.items()}
  assert str(explain(QUERY, KEY, KEY, **numbers, **key)) == str(wanted)


def test_names_of_jax_nn_are_told_apart():
  message = r"None, which chooses, .* name of jax.nn: leave implementation out"
  with pytest.raises(ValueError, match=message):
    call(implementation="xla")


def test_the_choice_is_logged(caplog):
  with caplog.at_level("DEBUG", logger="relpos_jax.attention.choice"):
    jax.eval_shape(functools.partial(call, implementation="skew"))
  assert "attention by skew, because implementation= names it" in caplog.text
