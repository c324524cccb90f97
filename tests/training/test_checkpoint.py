"""What is saved comes back bit for bit, and what cannot come back is refused in one line."""

import logging
import shutil
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from relpos_jax.errors import InputError
from relpos_jax.training.checkpoint import Checkpoints
from relpos_jax.typing import PyTree


class State(NamedTuple):
  step: jax.Array
  params: PyTree
  opt_state: PyTree


def make_state(seed=0):
  params = nnx.state(nnx.Linear(16, 8, rngs=nnx.Rngs(seed)), nnx.Param)
  return State(jnp.int32(seed), params, optax.adam(lambda _: 0.1).init(params))


def assert_same_bits(tree, wanted):
  assert jax.tree.structure(tree) == jax.tree.structure(wanted)
  for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True):
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def checkpoints(tmp_path):
  with Checkpoints(tmp_path / "checkpoints") as checkpoints:
    yield checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Three checkpoints in a folder that no test changes."""
  folder = tmp_path_factory.mktemp("run") / "checkpoints"
  with Checkpoints(folder) as checkpoints:
    for step in (1, 2, 3):
      checkpoints.save(step, make_state(step))
  return folder


@pytest.fixture
def copied(saved, tmp_path):
  """The same, free to damage."""
  return shutil.copytree(saved, tmp_path / "checkpoints")


def test_every_dtype_comes_back_bit_for_bit(checkpoints):
  words = np.random.default_rng(0).integers(0, 2**32, (4, 6), np.uint32)
  words[0, :4] = 0x7FC00001, 0x80000000, 0x00000001, 0xFF800000  # NaN payload, -0, denormal, -inf
  state = {
    "float32": jnp.asarray(words.view(np.float32)),
    "bfloat16": jnp.asarray(words.view(jnp.bfloat16)),
    "float16": jnp.asarray(words.view(np.float16)),
    "uint32": jnp.asarray(words),
    "int32": jnp.asarray(words.view(np.int32)),
    "int8": jnp.asarray(words.view(np.int8)),
    "bool": jnp.asarray(words > 2**31),
    "scalar": jnp.float32(np.pi),
  }
  checkpoints.save(1, state)
  assert_same_bits(checkpoints.restore(like=state), state)


def test_the_structure_is_that_of_like(checkpoints):
  state = dict(train=make_state(), nested=[{"a": (jnp.ones(2), jnp.zeros(3))}, optax.EmptyState()])
  checkpoints.save(1, state)
  assert_same_bits(checkpoints.restore(like=state), state)


def test_an_abstract_state_will_do(saved):
  abstract = jax.eval_shape(lambda: make_state())
  assert_same_bits(Checkpoints(saved).restore(like=abstract), make_state(3))


def test_any_step_can_be_had_and_the_last_is_the_default(saved):
  checkpoints = Checkpoints(saved)
  assert checkpoints.steps() == [1, 2, 3] and checkpoints.latest_step() == 3
  assert_same_bits(checkpoints.restore(1, like=make_state()), make_state(1))
  assert_same_bits(checkpoints.restore(like=make_state()), make_state(3))


def test_a_field_alone_can_be_had(saved):
  params = Checkpoints(saved).restore(2, like=make_state().params, field="params")
  assert_same_bits(params, make_state(2).params)
  assert Checkpoints(saved).restore(2, like=jnp.int32(0), field="step") == 2


def test_the_last_ones_are_kept(tmp_path):
  with Checkpoints(tmp_path / "new", keep=2) as checkpoints:
    assert checkpoints.steps() == [] and checkpoints.latest_step() is None
    for step in (5, 10, 20):
      checkpoints.save(step, make_state(step))
    assert checkpoints.steps() == [10, 20] and checkpoints.latest_step() == 20


def test_steps_saved_meanwhile_by_another_process_are_seen(saved, copied):
  reader = Checkpoints(copied)
  assert reader.latest_step() == 3
  with Checkpoints(copied) as writer:
    writer.save(4, make_state(4))
  assert reader.latest_step() == 4
  assert_same_bits(reader.restore(like=make_state()), make_state(4))


def test_a_state_may_be_donated_right_after_the_save(checkpoints):
  advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
  state = {str(i): jnp.full((256, 256), float(i)) for i in range(20)}
  wanted = jax.tree.map(np.array, state)
  checkpoints.save(1, state)
  for _ in range(5):
    state = advance(state)
  assert_same_bits(checkpoints.restore(like=state), wanted)


@pytest.mark.parametrize("many_first", [True, False])
def test_the_shardings_are_those_of_like(checkpoints, many_first):
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  many = NamedSharding(mesh, PartitionSpec("data"))
  before, after = (many, SingleDeviceSharding(jax.devices()[1]))[:: 1 if many_first else -1]
  state = {"w": jax.device_put(jnp.arange(64.0).reshape(16, 4), before)}
  checkpoints.save(1, state)
  like = {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=after)}
  restored = checkpoints.restore(like=like)
  assert_same_bits(restored, state)
  assert restored["w"].sharding == after


@pytest.mark.parametrize("num, steps", [(1, [3]), (2, [2, 3]), (3, [1, 2, 3]), (9, [1, 2, 3])])
def test_average_is_the_mean_of_the_last_parameters(saved, num, steps):
  params = [make_state(step).params for step in steps]
  average = Checkpoints(saved).average(num, like=params[0])
  assert jax.tree.structure(average) == jax.tree.structure(params[0])
  wanted = jax.tree.map(lambda *x: np.mean(np.asarray(x, np.float64), axis=0), *params)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-8), average, wanted)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(average))
  if num == 1:
    assert_same_bits(average, params[0])


def test_average_sums_in_float32(checkpoints):
  values = [1.0, 2.0**-8, 2.0**-8, 2.0**-8]  # in bfloat16 1 + 2**-8 is 1
  for step, value in enumerate(values):
    checkpoints.save(step, dict(params=jnp.full(3, value, jnp.bfloat16)))
  average = checkpoints.average(4, like=jnp.zeros(3, jnp.bfloat16))
  assert average.dtype == jnp.bfloat16
  np.testing.assert_array_equal(average, jnp.asarray(np.mean(values), jnp.bfloat16))


def test_an_interrupted_save_is_no_checkpoint_and_can_be_repeated(copied):
  shutil.copytree(copied / "3", copied / "4.orbax-checkpoint-tmp")
  with Checkpoints(copied) as checkpoints:
    assert checkpoints.latest_step() == 3
    checkpoints.save(4, make_state(4))
    assert_same_bits(checkpoints.restore(like=make_state()), make_state(4))


def test_saving_logs_nothing(checkpoints, caplog):
  caplog.set_level(logging.DEBUG)
  for step in (1, 2):
    checkpoints.save(step, make_state())
  checkpoints.restore(like=make_state())
  assert not [record for record in caplog.records if "orbax" in record.pathname]


def refusal(action):
  with pytest.raises(InputError) as error:
    action()
  assert "\n" not in str(error.value)
  return str(error.value)


@pytest.mark.parametrize("made", [False, True])
def test_no_checkpoint_names_the_folder_and_makes_none(tmp_path, made):
  folder = tmp_path / "checkpoints"
  if made:
    folder.mkdir()
  with Checkpoints(folder) as checkpoints:
    for action in (
      lambda: checkpoints.restore(like=make_state()),
      lambda: checkpoints.average(3, like=make_state().params),
    ):
      assert f"no checkpoint in {folder}: train first" in refusal(action)
  assert folder.exists() == made


def test_an_absent_step_is_refused_with_those_there_are(saved):
  text = refusal(lambda: Checkpoints(saved).restore(7, like=make_state()))
  assert "step 7" in text and "there are 1, 2, 3" in text


@pytest.mark.parametrize(
  "change, words",
  [
    (lambda s: s._replace(params=dict(s.params, extra=jnp.ones(2))), "params.extra absent float32"),
    (lambda s: s._replace(opt_state=s.opt_state[0]), "opt_state.0.count int32[] absent"),
    (lambda s: s._replace(step=s.step[None]), "step int32[] int32[1]"),
    (lambda s: s._replace(step=s.step.astype(jnp.float32)), "step int32[] float32[]"),
  ],
)
def test_another_structure_shape_or_dtype_names_the_leaf(saved, change, words):
  text = refusal(lambda: Checkpoints(saved).restore(like=change(make_state())))
  assert str(saved / "3") in text and "another --workdir" in text
  assert all(word in text for word in words.split())


def test_a_checkpoint_of_another_program_is_refused(tmp_path):
  with ocp.CheckpointManager(tmp_path) as manager:
    manager.save(1, args=ocp.args.StandardSave(dict(w=jnp.ones(3))))
  text = refusal(lambda: Checkpoints(tmp_path).restore(like=dict(w=jnp.ones(3))))
  assert str(tmp_path / "1") in text and "not saved by relpos_jax" in text


TRUNCATE_EACH_FILE = """
import pathlib, shutil, sys
import jax
from relpos_jax.errors import InputError
from relpos_jax.training.checkpoint import Checkpoints

whole, damaged = pathlib.Path(sys.argv[1], "whole"), pathlib.Path(sys.argv[1], "damaged")
state = dict(w=jax.random.normal(jax.random.key(0), (64, 64)))
with Checkpoints(whole) as checkpoints:
  checkpoints.save(3, state)
for file in sorted(path for path in whole.rglob("*") if path.is_file()):
  shutil.copytree(whole, damaged)
  half = file.read_bytes()[: file.stat().st_size // 2]
  damaged.joinpath(file.relative_to(whole)).write_bytes(half)
  try:
    assert (Checkpoints(damaged).restore(like=state)["w"] == state["w"]).all()
    print("harmless")
  except InputError as error:
    print(error)
  shutil.rmtree(damaged)
"""


def test_a_truncated_file_is_refused_or_harmless(tmp_path):
  # In a process of its own: reads that Orbax leaves behind when one fails complain when it ends.
  script = [sys.executable, "-c", TRUNCATE_EACH_FILE, str(tmp_path)]
  lines = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
  refused = [line for line in lines if line != "harmless"]
  assert len(lines) > 10 and len(refused) >= 4
  for line in refused:
    assert f"checkpoint {tmp_path / 'damaged' / '3'} cannot be read" in line
    assert "delete this folder" in line


def test_saving_a_step_again_is_an_error(copied):
  with Checkpoints(copied) as checkpoints:
    for step in (2, 3):
      with pytest.raises(ValueError, match=f"step {step} is not after the last one saved, 3"):
        checkpoints.save(step, make_state())


def test_names_that_collide_are_refused(checkpoints):
  with pytest.raises(ValueError, match="same name"):
    checkpoints.save(1, {"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)})


def test_a_folder_must_keep_at_least_one(tmp_path):
  with pytest.raises(ValueError, match="keep"):
    Checkpoints(tmp_path, keep=0)
