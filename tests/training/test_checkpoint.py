"""What is saved comes back bit for bit; what cannot is refused in one line."""

import errno
import json
import os
import resource
import shutil
import subprocess
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from faults import damage, refusal
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from train_states import assert_same_bits, make_state

from experiments.training.averaging import average_last
from experiments.training.checkpoint import Checkpoints
from experiments.training.checkpoint_reader import Damage, check_digests


@pytest.fixture
def checkpoints(tmp_path):
  with Checkpoints(tmp_path / "checkpoints") as checkpoints:
    yield checkpoints


NAN_WITH_PAYLOAD, MINUS_ZERO = 0x7FC00001, 0x80000000
DENORMAL, MINUS_INFINITY = 0x00000001, 0xFF800000


DTYPES = ("float32", "bfloat16", "float16", "uint32", "int32", "int8")


def test_every_dtype_comes_back_bit_for_bit(checkpoints):
  words = np.random.default_rng(0).integers(0, 2**32, (4, 6), np.uint32)
  words[0, :4] = NAN_WITH_PAYLOAD, MINUS_ZERO, DENORMAL, MINUS_INFINITY
  state = {dtype: jnp.asarray(words.view(jnp.dtype(dtype))) for dtype in DTYPES}
  checkpoints.save(1, state)
  assert_same_bits(checkpoints.restore(like=state), state)


def test_a_save_leaves_signals_to_the_loop(checkpoints, monkeypatch):
  """Both would give JAX numbers of steps, and all must be of one count."""
  asked = []
  monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked.append)
  checkpoints.save(1, make_state())
  checkpoints.wait()
  assert not asked


def test_others_can_check_the_digests(saved):
  words = ["sha256sum", "--check", "--strict", "sha256sums.txt"]
  checked = subprocess.run(words, cwd=saved / "3", check=True, capture_output=True)
  assert {b"manifest/metadata: OK", b"state/_METADATA: OK"} < {
    *checked.stdout.split(b"\n")
  }


def test_an_older_checkpoint_has_other_digests_and_is_restored(copied, capsys):
  (copied / "3" / "sha256sums.txt").unlink()
  file = copied / "3" / "manifest" / "metadata"
  arrays = json.loads(file.read_text())["arrays"]
  arrays = {name: [*kind, "6651a214a3ff51cb"] for name, kind in arrays.items()}
  file.write_text(json.dumps(dict(step=3, arrays=arrays, digest="0")))
  assert_same_bits(Checkpoints(copied).restore(like=make_state()), make_state(3))
  assert "checkpoint 3 has no sha256sums.txt: it is read" in capsys.readouterr().err


def averaged_steps(checkpoints, num, **options) -> list[int]:
  return average_last(checkpoints, num, like=make_state().params, **options)[1]


def test_a_step_between_saves_is_kept_until_the_next_save(tmp_path):
  with Checkpoints(tmp_path, keep=3, save_every=10) as checkpoints:
    for step, kept in ((40, [40]), (47, [40, 47]), (50, [40, 50]), (54, [40, 50, 54])):
      checkpoints.save(step, make_state(step))
      assert checkpoints.steps() == kept
      assert checkpoints.restore(like=make_state()).step == step
    assert averaged_steps(checkpoints, 3) == [50, 54]
    checkpoints.save(60, make_state(60))
    assert checkpoints.steps() == [40, 50, 60]
    for since, averaged in ((0, [50, 60]), (51, [60]), (70, [60])):
      assert averaged_steps(checkpoints, 3, since=since) == averaged


def test_another_interval_keeps_what_was_kept(tmp_path):
  with Checkpoints(tmp_path, save_every=10) as checkpoints:
    for step in (30, 40, 50, 53):
      checkpoints.save(step, make_state(step))
  with Checkpoints(tmp_path, save_every=8) as checkpoints:
    for step, after in ((56, [56]), (57, [56, 57]), (64, [56, 64])):
      checkpoints.save(step, make_state(step))
      assert checkpoints.steps() == [30, 40, 50, *after]
  steps = averaged_steps(Checkpoints(tmp_path), 5, part=1.0)
  assert steps == [30, 40, 50, 56, 64]


def test_an_interrupted_save_is_no_checkpoint_and_can_be_repeated(copied):
  shutil.copytree(copied / "3", copied / "4.orbax-checkpoint-tmp")
  with Checkpoints(copied) as checkpoints:
    assert checkpoints.steps() == [1, 2, 3]
    checkpoints.save(4, make_state(4))
    assert_same_bits(checkpoints.restore(like=make_state()), make_state(4))


MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
MANY = NamedSharding(MESH, PartitionSpec("data"))
ONE = SingleDeviceSharding(jax.devices()[1])


@pytest.mark.parametrize("before, after", [(MANY, ONE), (ONE, MANY)])
def test_the_shardings_are_those_of_like(checkpoints, before, after):
  state = {"w": jax.device_put(jnp.arange(64.0).reshape(16, 4), before)}
  checkpoints.save(1, state)
  like = {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=after)}
  restored = checkpoints.restore(like=like)
  assert_same_bits(restored, state)
  assert restored["w"].sharding == after


STATE = make_state()


@pytest.mark.parametrize(
  "change, words",
  [
    (dict(params=dict(STATE.params, extra=jnp.ones(2))), "params.extra absent float32"),
    (dict(opt_state=STATE.opt_state[0]), "another optimizer: opt_state.0.count absent"),
    (dict(step=STATE.step[None]), "another model: step int32[] int32[1]"),
  ],
)
def test_another_structure_shape_or_dtype_names_the_leaf(saved, change, words):
  text = refusal(Checkpoints(saved).restore, like=STATE._replace(**change))
  wanted = ["checkpoint 3 is of", "another --workdir", *words.split()]
  assert [word for word in wanted if word not in text] == []


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def test_a_damaged_step_is_set_aside_and_its_number_can_be_saved_again(copied, capsys):
  for name in ("damaged-3", "damaged-3-2"):
    damage(copied / "3")
    with Checkpoints(copied, keep=2, rename_damaged=True) as checkpoints:
      assert_same_bits(checkpoints.restore(like=make_state()), make_state(2))
      (line,) = capsys.readouterr().err.splitlines()
      assert f"checkpoint {copied / '3'} is damaged: " in line
      assert line.endswith(f": renamed to {name}")
      assert (copied / name / "reason.txt").read_text().strip() in line
      checkpoints.save(3, make_state(3))
      assert_same_bits(checkpoints.restore(like=make_state()), make_state(3))
  assert names(copied) == ["2", "3", "damaged-3", "damaged-3-2"]
  damage(copied / "2")
  damage(copied / "3")
  with Checkpoints(copied, rename_damaged=True) as checkpoints:
    for _ in range(2):  # there is no fresh start
      text = refusal(checkpoints.restore, like=make_state())
      assert f"no good checkpoint in {copied}: damaged are damaged-2, damaged-3" in text


def test_a_reader_passes_over_what_is_damaged_and_changes_nothing(copied, capsys):
  damage(copied / "3")
  checkpoints = Checkpoints(copied)
  assert_same_bits(checkpoints.restore(like=make_state()), make_state(2))
  assert averaged_steps(checkpoints, 3, part=1.0) == [1, 2]
  first, second, last = capsys.readouterr().err.splitlines()
  for line in (first, second):
    assert f"checkpoint {copied / '3'} is damaged: " in line
    assert line.endswith(": passed over")
  assert "averages 1, 2 alone" in last
  damage(copied / "1")
  damage(copied / "2")
  text = refusal(checkpoints.restore, like=make_state())
  assert f"no good checkpoint in {copied}: damaged are 1, 2, 3" in text
  assert names(copied) == ["1", "2", "3"]


def flip_first_bit(file):
  content = file.read_bytes()
  file.write_bytes(bytes([content[0] ^ 1, *content[1:]]))


def truncate(file):
  file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [flip_first_bit, truncate, os.remove])
def test_damage_of_any_file_is_found(copied, harm):
  step = copied / "3"
  files = [file for file in step.rglob("*") if file.is_file() and file.parent != step]
  assert len(files) > 5
  for file in files:
    content = file.read_bytes()
    harm(file)
    with pytest.raises(Damage, match=r"cannot be read|is not what was saved"):
      check_digests(step)
    file.write_bytes(content)


@pytest.mark.parametrize("harm", [flip_first_bit, truncate, os.remove])
def test_damage_beside_the_state_restores_a_step_as_it_was(copied, harm):
  # The digests, and what Orbax adds later.
  for file in [file for file in (copied / "3").iterdir() if file.is_file()]:
    content = file.read_bytes()
    harm(file)
    restored = Checkpoints(copied).restore(like=make_state())
    assert_same_bits(restored, make_state(int(restored.step)))
    file.write_bytes(content)


def test_damage_of_an_older_checkpoint_is_what_orbax_finds(copied):
  (copied / "3" / "sha256sums.txt").unlink()
  (copied / "3" / "state" / "array_metadatas" / "process_0").write_text("null")
  assert Checkpoints(copied).restore(like=make_state()).step == 2


def test_a_step_in_the_folder_of_another_is_damage(copied, capsys):
  shutil.rmtree(copied / "3")
  shutil.copytree(copied / "1", copied / "3")
  with Checkpoints(copied, rename_damaged=True) as checkpoints:
    assert_same_bits(checkpoints.restore(like=make_state()), make_state(2))
  assert "3 is damaged: it is of step 1: " in capsys.readouterr().err
  assert names(copied) == ["1", "2", "damaged-3"]


@pytest.mark.parametrize(
  "error",
  [
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"),
    OSError(errno.ESTALE, "Stale file handle"),
  ],
)
def test_what_is_not_the_checkpoints_fault_sets_nothing_aside(
  copied, monkeypatch, error
):
  monkeypatch.setattr(ocp.Checkpointer, "restore", mock.Mock(side_effect=error))
  with pytest.raises(type(error)):
    Checkpoints(copied, rename_damaged=True).restore(like=make_state())
  assert names(copied) == ["1", "2", "3"]


def test_a_path_in_which_orbax_loses_what_it_saves_is_refused(tmp_path):
  text = refusal(Checkpoints, tmp_path / "lr[0.1]" / "checkpoints")
  assert "another --workdir" in text
  assert text.isprintable()
  assert not names(tmp_path)


# A disk that takes no more
# --------------------------------------------------------------------------------------


@pytest.fixture(params=["File too large", "Read-only file system"])
def reason(request, monkeypatch):
  if "Read-only" in request.param:
    error = OSError(errno.EROFS, request.param)
    monkeypatch.setattr(os, "mkdir", mock.Mock(side_effect=error))
    yield request.param
    return
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
  yield request.param
  resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("then", [Checkpoints.close, Checkpoints.steps])
def test_a_write_that_the_disk_refuses_is_one_line_and_nothing_waits(
  copied, reason, then
):
  large = make_state()._replace(params=jax.random.normal(jax.random.key(0), (256, 256)))
  checkpoints, threads = Checkpoints(copied), {*threading.enumerate()}

  def save():
    checkpoints.save(4, large)
    then(checkpoints)

  text = refusal(save)
  assert f"cannot write a checkpoint in {copied} ({reason}): " in text
  new = {type(thread).__name__ for thread in {*threading.enumerate()} - threads}
  assert not [name for name in new if "Signaling" in name]
  assert names(copied) == ["1", "2", "3"]
  assert_same_bits(Checkpoints(copied).restore(like=make_state()), make_state(3))
