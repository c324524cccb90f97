"""What is saved comes back bit for bit, and what cannot come back is refused in one line."""

import errno
import functools
import gc
import json
import os
import pathlib
import re
import resource
import shutil
import tempfile
import threading
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from experiments.errors import InputError
from experiments.training import manifest
from experiments.training.checkpoint import Checkpoints
from experiments.training.checkpoint_reader import examine
from experiments.training.manifest import Damage
from experiments.training.step import init_state


def make_state(seed=0):
  params = nnx.state(nnx.Linear(16, 8, rngs=nnx.Rngs(seed)), nnx.Param)
  return init_state(params, optax.adam(0.1))._replace(step=jnp.int32(seed))


def refusal(action):
  with pytest.raises(InputError) as error:
    action()
  assert "\n" not in str(error.value)
  return str(error.value)


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
  folder = tmp_path_factory.mktemp("run") / "checkpoints"
  with Checkpoints(folder) as checkpoints:
    for step in (1, 2, 3):
      checkpoints.save(step, make_state(step))
  return folder


@pytest.fixture
def copied(saved, tmp_path):
  return shutil.copytree(saved, tmp_path / "checkpoints")


def test_the_first_save_is_complete_on_return(tmp_path):
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, make_state(1))
    assert names(tmp_path) == ["1"]


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


def test_any_step_can_be_restored_and_the_last_is_the_default(saved):
  checkpoints = Checkpoints(saved)
  assert checkpoints.steps() == [1, 2, 3] and checkpoints.latest_step() == 3
  abstract = jax.eval_shape(make_state)
  assert_same_bits(checkpoints.restore(1, like=abstract), make_state(1))
  assert_same_bits(checkpoints.restore(like=abstract), make_state(3))
  params = checkpoints.restore(2, like=make_state().params, field="params")
  assert_same_bits(params, make_state(2).params)
  assert "7 does not exist: there are 1, 2, 3" in refusal(
    lambda: checkpoints.restore(7, like=abstract)
  )


def test_a_step_between_saves_is_kept_until_the_next_save(tmp_path):
  with Checkpoints(tmp_path, keep=3, save_every=10) as checkpoints:
    for step, kept in ((40, [40]), (47, [40, 47]), (50, [40, 50]), (54, [40, 50, 54])):
      checkpoints.save(step, make_state(step))
      assert checkpoints.steps() == kept and checkpoints.restore(like=make_state()).step == step
    assert checkpoints.average(3, like=make_state().params)[1] == [50, 54]
    checkpoints.save(60, make_state(60))
    assert checkpoints.steps() == [40, 50, 60]
    for since, averaged in ((0, [50, 60]), (51, [60]), (70, [60])):
      assert checkpoints.average(3, like=make_state().params, since=since)[1] == averaged


def test_an_interrupted_save_is_no_checkpoint_and_can_be_repeated(copied):
  shutil.copytree(copied / "3", copied / "4.orbax-checkpoint-tmp")
  with Checkpoints(copied) as checkpoints:
    assert checkpoints.latest_step() == 3
    checkpoints.save(4, make_state(4))
    assert_same_bits(checkpoints.restore(like=make_state()), make_state(4))


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
  average, averaged = Checkpoints(saved).average(num, like=params[0], part=1.0)
  assert averaged == steps
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
  average, _ = checkpoints.average(4, like=jnp.zeros(3, jnp.bfloat16), part=1.0)
  assert average.dtype == jnp.bfloat16
  np.testing.assert_array_equal(average, jnp.asarray(np.mean(values), jnp.bfloat16))


@pytest.fixture
def average(copied, tmp_path):
  """Returns a function that averages two steps of a copy, and keeps what it finds."""
  file, like = tmp_path / "average.npz", make_state().params
  return lambda **options: Checkpoints(copied).average(2, part=1.0, keep=file, like=like, **options)


def test_an_average_is_kept_and_read_without_the_checkpoints(copied, average):
  wanted, steps = average()
  for step in (1, 2, 3):
    shutil.rmtree(copied / str(step) / "state")
  found, again = average()
  assert_same_bits(found, wanted)
  assert again == steps == [2, 3]


@pytest.mark.parametrize("change", ["damaged", "a step", "a manifest", "a kind"])
def test_an_average_is_computed_again_where_what_is_kept_is_not_it(
  copied, average, tmp_path, change
):
  average()
  file = tmp_path / "average.npz"
  kept = bytearray(file.read_bytes())
  if change == "damaged":
    kept[len(kept) // 2] ^= 4
    file.write_bytes(kept)
  elif change == "a step":
    with Checkpoints(copied) as checkpoints:
      checkpoints.save(4, make_state(4))
  elif change == "a manifest":
    shutil.rmtree(copied / "3")
    with Checkpoints(copied) as checkpoints:
      checkpoints.save(3, make_state(7))
  else:
    np.savez(file, **{name: x.astype(np.float16) for name, x in np.load(file).items() if x.ndim})
  wanted, _ = Checkpoints(copied).average(2, part=1.0, like=make_state().params)
  assert_same_bits(average()[0], wanted)


def test_an_average_without_a_damaged_step_is_not_kept(copied, average, capsys):
  good = (copied / "3").with_name("good")
  shutil.copytree(copied / "3", good)
  flip(copied, 3)
  assert average()[1] == [1, 2]
  shutil.rmtree(copied / "3")
  good.rename(copied / "3")
  assert average()[1] == [2, 3]
  assert "passed over" in capsys.readouterr().err


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


def flip(folder, step):
  """Flips bits of every data file, for parts of some are not in use."""
  for file in (folder / str(step)).rglob("d/*"):
    content = bytearray(file.read_bytes())
    content[::101] = (octet ^ 4 for octet in content[::101])
    file.write_bytes(content)


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def test_a_damaged_step_is_set_aside_and_its_number_can_be_saved_again(copied, capsys):
  for count, name in enumerate(("damaged-3", "damaged-3-2"), start=1):
    flip(copied, 3)
    with Checkpoints(copied, keep=2, rename_damaged=True) as checkpoints:
      assert_same_bits(checkpoints.restore(like=make_state()), make_state(2))
      line = capsys.readouterr().err
      assert line.count("\n") == 1 and line.endswith(f": renamed to {name}\n")
      assert f"checkpoint {copied / '3'} is damaged: " in line
      assert (copied / name / "reason.txt").read_text().strip() in line
      assert checkpoints.latest_step() == 2
      checkpoints.save(3, make_state(3))
      assert_same_bits(checkpoints.restore(like=make_state()), make_state(3))
    assert names(copied) == ["2", "3", "damaged-3", "damaged-3-2"][: 2 + count]
  flip(copied, 2), flip(copied, 3)
  with Checkpoints(copied, rename_damaged=True) as checkpoints:  # there is no fresh start
    for action in (lambda: checkpoints.restore(like=make_state()), checkpoints.latest_step):
      assert f"no good checkpoint in {copied}: damaged are damaged-2, damaged-3" in refusal(action)


def test_a_reader_passes_over_what_is_damaged_and_changes_nothing(copied, capsys):
  flip(copied, 3)
  checkpoints = Checkpoints(copied)
  assert_same_bits(checkpoints.restore(like=make_state()), make_state(2))
  average, _ = checkpoints.average(3, like=make_state().params, part=1.0)
  *lines, last = capsys.readouterr().err.splitlines()
  assert len(lines) == 2 and all(line.endswith(": passed over") for line in lines)
  assert all(f"checkpoint {copied / '3'} is damaged: " in line for line in lines)
  assert "averages 1, 2 alone" in last and "fewer than 3 good checkpoints" in last
  kernels = [np.asarray(make_state(step).params["kernel"]) for step in (1, 2)]
  np.testing.assert_allclose(average["kernel"], np.mean(kernels, 0), rtol=1e-6, atol=1e-8)
  text = refusal(lambda: checkpoints.restore(3, like=make_state()))
  assert f"checkpoint {copied / '3'} is damaged: there are 1, 2" in text
  flip(copied, 1)
  flip(copied, 2)
  text = refusal(lambda: checkpoints.restore(like=make_state()))
  assert f"no good checkpoint in {copied}: damaged are 1, 2, 3" in text
  assert names(copied) == ["1", "2", "3"]


@pytest.mark.parametrize("entry", [["int32[7]", None], ["int32[]", "0" * 16]])
def test_the_manifest_itself_is_verified(copied, entry):
  file = copied / "3" / "manifest" / "metadata"
  content = json.loads(file.read_text())
  content["arrays"]["step"] = entry
  file.write_text(json.dumps(content))
  with pytest.raises(Damage, match="its manifest has another digest"):
    examine(copied / "3")


@pytest.mark.parametrize(
  "name, old, new",
  [
    ("_METADATA", r'\[{"key": "step", "key_type": 2}\]', "[]"),
    ("array_metadatas/process_0", ".*", "null"),  # found while arrays are read
  ],
)
def test_damaged_metadata_of_orbax_are_damage_and_one_line(copied, capfd, name, old, new):
  file = copied / "3" / "state" / name
  file.write_text(re.sub(old, new, file.read_text(), count=1))
  for _ in range(9):
    assert Checkpoints(copied).restore(like=make_state()).step == 2
  gc.collect()
  assert capfd.readouterr().err.count("\n") == 9


@pytest.mark.parametrize("content", [None, [], {}, {"w": "hello"}, {"w": "flot32[3]"}, {"w": 3}])
def test_what_is_no_manifest_is_damage(content):
  with pytest.raises(Damage, match="its manifest cannot be understood"):
    manifest.read_manifest(content, 3)


@pytest.mark.parametrize("value", [..., None, np.zeros(2, np.int32), np.zeros(3, np.int16)])
def test_what_comes_back_must_be_an_array_of_its_kind(value):
  with pytest.raises(Damage, match=r"w is .*; int32\[3\] was saved"):
    manifest.check_kinds({"w": value}, {"w": manifest.Entry("int32[3]", "0" * 16)})


def test_a_step_in_the_folder_of_another_is_damage(copied, capsys):
  shutil.rmtree(copied / "2")
  (copied / "3").rename(copied / "2")
  shutil.copytree(copied / "1", copied / "3")
  for step, there in ((2, 3), (3, 1)):
    with pytest.raises(Damage, match=f"it is of step {there}: "):
      examine(copied / str(step))
  with Checkpoints(copied, rename_damaged=True) as checkpoints:
    assert_same_bits(checkpoints.restore(like=make_state()), make_state(1))
    assert_same_bits(checkpoints.average(3, like=make_state().params)[0], make_state(1).params)
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 3 and lines[0].endswith(": renamed to damaged-3")
  assert names(copied) == ["1", "damaged-2", "damaged-3"]


def test_a_hiccup_and_a_step_deleted_meanwhile_are_not_damage(copied, capsys, monkeypatch):
  check, calls = manifest.check_digests, []

  def fails(arrays, entries, doing=lambda: None):
    calls.append(entries)
    if len(calls) == 1:
      doing()
      raise Damage("gone")
    check(arrays, entries)

  checkpoints = Checkpoints(copied, rename_damaged=True)
  monkeypatch.setattr(manifest, "check_digests", fails)
  assert checkpoints.restore(like=make_state()).step == 3
  calls.clear()
  delete = lambda: shutil.rmtree(copied / "3")
  monkeypatch.setattr(manifest, "check_digests", functools.partial(fails, doing=delete))
  assert checkpoints.restore(like=make_state()).step == 2
  assert names(copied) == ["1", "2"] and not capsys.readouterr().err


@pytest.mark.parametrize("reason", ["RESOURCE_EXHAUSTED: out of memory", "PERMISSION_DENIED: a"])
def test_what_is_not_the_checkpoints_fault_sets_nothing_aside(copied, monkeypatch, reason):
  def fail(*_, **__):
    raise ValueError(reason)

  monkeypatch.setattr(ocp.Checkpointer, "restore", fail)
  with pytest.raises(ValueError, match=reason):
    Checkpoints(copied, rename_damaged=True).restore(like=make_state())
  assert names(copied) == ["1", "2", "3"]


@pytest.mark.parametrize("what", [".", "3/manifest", "3/state/d"])
def test_what_may_not_be_read_is_not_damaged(saved, what):
  with tempfile.TemporaryDirectory() as name:  # pytest's own folders are open to one user alone
    os.chmod(name, 0o755)
    folder = pathlib.Path(shutil.copytree(saved, f"{name}/checkpoints"))
    mode = (folder / what).stat().st_mode
    (folder / what).chmod(0)
    user = os.geteuid()
    try:
      os.seteuid(65534 if user == 0 else user)
      with pytest.raises((InputError, PermissionError), match=f"{folder / what}"):
        Checkpoints(folder, rename_damaged=True).restore(like=make_state())
    finally:
      os.seteuid(user)
      (folder / what).chmod(mode)
    assert names(folder) == ["1", "2", "3"]


@pytest.mark.parametrize("name", ["lr[0.1]", "a*"])
def test_a_path_in_which_orbax_loses_what_it_saves_is_refused(tmp_path, name):
  text = refusal(lambda: Checkpoints(tmp_path / name / "checkpoints"))
  assert "another --workdir" in text and text.isprintable()
  assert not names(tmp_path)


# A disk that takes no more -----------------------------------------------------------------------


@pytest.fixture(params=["File too large", "Read-only file system"])
def reason(request, monkeypatch):
  if "Read-only" in request.param:
    error = OSError(errno.EROFS, request.param)
    monkeypatch.setattr(os, "mkdir", unittest.mock.Mock(side_effect=error))
    yield request.param
    return
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
  yield request.param
  resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("then", [Checkpoints.close, Checkpoints.steps])
def test_a_write_that_the_disk_refuses_is_one_line_and_nothing_waits(copied, reason, then):
  large = make_state()._replace(params=jax.random.normal(jax.random.key(0), (256, 256)))
  checkpoints, threads = Checkpoints(copied), {*threading.enumerate()}

  def save():
    checkpoints.save(4, large)
    then(checkpoints)

  text = refusal(save)
  assert f"cannot write a checkpoint in {copied} ({reason}): " in text
  assert not [x for x in {*threading.enumerate()} - threads if "Signaling" in type(x).__name__]
  assert names(copied) == ["1", "2", "3"]
  assert_same_bits(Checkpoints(copied).restore(like=make_state()), make_state(3))
