"""Checkpoints of a training state: the only module that knows Orbax."""

import functools
import logging
import pathlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from relpos_jax.errors import InputError
from relpos_jax.typing import PyTree

# Orbax logs every phase of every save, and errors that it raises as well: not for the user's eyes.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


class Checkpoints:
  """The checkpoints of one run: a folder with one numbered sub-folder a step.

  A state is any pytree of arrays. It is stored as arrays by name (`params.encoder.kernel`) with a
  manifest of their shapes and dtypes, and comes back, bit for bit, in the structure and with the
  shardings of `like`, whatever shardings it was saved with. Saving goes on in the background, and
  a step is there entirely or not at all.

  >>> import tempfile
  >>> state = dict(params=dict(kernel=jnp.ones((2, 3))), step=jnp.int32(7))
  >>> with tempfile.TemporaryDirectory() as folder, Checkpoints(folder, keep=2) as checkpoints:
  ...   for step in (1, 2, 3):
  ...     checkpoints.save(step, state)
  ...   restored = checkpoints.restore(like=state)
  ...   print(checkpoints.steps(), restored["step"])
  [2, 3] 7
  """

  def __init__(self, folder: str | pathlib.Path, keep: int = 5):
    """Nothing is touched before the first save.

    Args:
      folder: of this run's checkpoints alone.
      keep: how many of the last checkpoints stay; older ones are deleted after each save.
    """
    if keep < 1:
      raise ValueError(f"keep must be at least 1, not {keep}")
    self.folder = pathlib.Path(folder)
    self._keep = keep

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def close(self) -> None:
    """Waits for the last save; raises what made it fail."""
    if self.folder.is_dir():
      self._manager.close()

  def steps(self) -> list[int]:
    """The steps there are, in order; waits for a save under way."""
    if not self.folder.is_dir():
      return []
    self._manager.wait_until_finished()
    return sorted(self._manager.all_steps(read=True))

  def latest_step(self) -> int | None:
    """The last step there is, or None."""
    return max(self.steps(), default=None)

  def save(self, step: int, state: PyTree) -> None:
    """Saves in the background; only copies are read after the call, so `state` may be donated.

    Raises:
      ValueError: `step` is not after all those saved.
    """
    arrays = _by_name(state)
    manifest = {name: _describe(array) for name, array in arrays.items()}
    items = ocp.args.Composite(
      state=ocp.args.PyTreeSave(arrays), manifest=ocp.args.JsonSave(manifest)
    )
    if not self._manager.save(step, args=items):
      raise ValueError(f"step {step} is not after the last one saved, {self.latest_step()}")

  def restore(self, step: int | None = None, *, like: PyTree, field: str = "") -> PyTree:
    """The state at `step`, or at the last one.

    Args:
      like: a state of the same structure, shapes and dtypes: arrays, or `jax.ShapeDtypeStruct`s.
        Their shardings are those of the result; without one, the first device.
      field: with the name of a field of the state, only that field is read and `like` is like it.

    Raises:
      InputError: there is no such checkpoint, or it cannot be read, or it is of something else.
    """
    step = self._choose(step)
    wanted = {name: _abstract(leaf) for name, leaf in _by_name(like, field).items()}
    self._check(step, wanted, field)
    request = ocp.args.PyTreeRestore(
      item=wanted,
      restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
      partial_restore=True,
    )
    arrays = self._read(step, state=request)
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])

  def average(self, num: int, *, like: PyTree, field: str = "params") -> PyTree:
    """The mean of a field over the last `num` checkpoints, or all if there are fewer.

    Summed in float32, in the dtypes of `like`. Vaswani et al. 2017, section 6.1.

    Raises:
      InputError: as for `restore`.
    """
    if num < 1:
      raise ValueError(f"num must be at least 1, not {num}")
    steps = self.steps()[-num:] or [None]
    total = None
    for step in steps:
      part = self.restore(step, like=like, field=field)
      total = part if total is None else _add(total, part)
    mean = lambda x, to: (x.astype(jnp.float32) / len(steps)).astype(to.dtype)
    return jax.jit(lambda total: jax.tree.map(mean, total, like))(total)

  @functools.cached_property
  def _manager(self) -> ocp.CheckpointManager:
    latest = ocp.checkpoint_managers.preservation_policy.LatestN(self._keep)
    options = ocp.CheckpointManagerOptions(preservation_policy=latest)
    return ocp.CheckpointManager(self.folder.absolute(), options=options)

  def _choose(self, step: int | None) -> int:
    steps = self.steps()
    if not steps:
      raise InputError(f"no checkpoint in {self.folder}: train first, or give another --workdir")
    if step is None:
      return steps[-1]
    if step not in steps:
      there = ", ".join(map(str, steps))
      raise InputError(f"no checkpoint of step {step} in {self.folder}: there are {there}")
    return step

  def _check(self, step: int, wanted: Mapping, field: str) -> None:
    """Compares the manifest with what is wanted; digests of the arrays will belong to it too."""
    path = self.folder / str(step)
    if not (path / "manifest").is_dir():
      raise InputError(
        f"checkpoint {path} was not saved by relpos_jax (it has no manifest): "
        "delete this folder, or give another --workdir"
      )
    stored = self._read(step, manifest=ocp.args.JsonRestore())
    stored = {n: text for n, text in stored.items() if not field or f"{n}.".startswith(f"{field}.")}
    here = {name: _describe(array) for name, array in wanted.items()}
    for name in sorted(here | stored):
      if here.get(name) != stored.get(name):
        raise InputError(
          f"checkpoint {path} is of another model: {name} is "
          f"{stored.get(name, 'absent')} there and {here.get(name, 'absent')} here: "
          "use the config it was trained with, or another --workdir"
        )

  def _read(self, step: int, **item):
    (name,) = item
    try:
      return self._manager.restore(step, args=ocp.args.Composite(**item))[name]
    except Exception as error:  # Orbax and TensorStore raise many kinds for one broken file.
      reason = " ".join(str(error).split())[:200]
      raise InputError(
        f"checkpoint {self.folder / str(step)} cannot be read "
        f"({type(error).__name__}: {reason}): delete this folder to use the one before"
      ) from error


@jax.jit
def _add(total: PyTree, part: PyTree) -> PyTree:
  return jax.tree.map(lambda t, x: t.astype(jnp.float32) + x.astype(jnp.float32), total, part)


def _by_name(tree: PyTree, field: str = "") -> dict[str, object]:
  """The leaves by their dotted paths."""
  field_path = (jax.tree_util.GetAttrKey(field),) if field else ()
  paths, _ = jax.tree.flatten_with_path(tree)
  name = lambda path: jax.tree_util.keystr(field_path + path, simple=True, separator=".")
  leaves = {name(path): leaf for path, leaf in paths}
  if len(leaves) != len(paths):
    raise ValueError("two leaves of the state have the same name: rename a key that has a dot")
  return leaves


def _describe(array) -> str:
  """
  >>> _describe(jnp.ones((2, 3), jnp.bfloat16))
  'bfloat16[2,3]'
  """
  return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _abstract(leaf) -> jax.ShapeDtypeStruct:
  sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
