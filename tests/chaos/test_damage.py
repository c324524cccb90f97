"""Damaged checkpoints and a full disk: right values are restored, or those of the step before."""

import pathlib
import resource

import numpy as np
import pytest

from chaos.run import digests, kept, shapes
from experiments.training.checkpoint import Checkpoints
from experiments.training.checkpoint_reader import list_steps, read

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def like(training):
  return shapes(training.undisturbed(), 100)


@pytest.fixture(scope="module")
def saved(training):
  folder = training.undisturbed() / "checkpoints"
  return {step: _octets(read(folder / str(step))) for step in (80, 100)}


def _octets(state) -> dict[str, bytes]:
  return {name: np.asarray(array).tobytes() for name, array in state.items()}


@pytest.fixture
def restore(training, saved, like, tmp_path, capfd, begin):
  """Restores a damaged copy, with the library or by the command, and judges the result."""

  def restore(what: str, damage, by_command: bool) -> None:
    workdir = training.copy(tmp_path / "run")
    damage(workdir / "checkpoints" / "100")
    figures = begin(f"{what}, by {'the command' if by_command else 'the library'}")
    if by_command:
      messages, found = training.to_its_end(workdir), None
    else:
      capfd.readouterr()
      with Checkpoints(workdir / "checkpoints", rename_damaged=True) as checkpoints:
        found = _octets(checkpoints.restore(like=like))
      messages = capfd.readouterr().err.splitlines()
    damaged = workdir / "checkpoints" / "damaged-100"
    figures["fell back" if damaged.exists() else "harmless"] = True
    assert found is None or found == saved[80 if damaged.exists() else 100], (
      "other values came back"
    )
    assert len(messages) == damaged.exists(), messages
    for line in messages:
      assert line.startswith(f"checkpoint {damaged.parent}/100 is damaged: ")
      assert ": renamed to " in line and (damaged / "reason.txt").is_file()

  return restore


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in folder.rglob("*") if path.is_file())


def test_bits(number, training, rng, restore):
  # All bits are equally probable; the command restores every tenth time.
  step = training.undisturbed() / "checkpoints" / "100"
  (file,) = rng.choices(_files(step), [file.stat().st_size for file in _files(step)])
  bit, name = rng.randrange(8 * file.stat().st_size), file.relative_to(step)
  restore(f"bit {bit} of {name}", lambda copy: _flip(copy / name, bit), number % 10 == 0)


def _flip(file: pathlib.Path, bit: int) -> None:
  content = bytearray(file.read_bytes())
  content[bit // 8] ^= 1 << bit % 8
  file.write_bytes(content)


@pytest.mark.parametrize("how", ["truncated", "removed"])
def test_files(how, training, rng, restore):
  step = training.undisturbed() / "checkpoints" / "100"
  for number, file in enumerate(_files(step)):
    name, size = file.relative_to(step), rng.randrange(file.stat().st_size)
    truncate = lambda file, size=size: file.write_bytes(file.read_bytes()[:size])
    damage = truncate if how == "truncated" else pathlib.Path.unlink
    what = f"{name} truncated to {size} bytes" if how == "truncated" else f"{name} removed"
    restore(what, lambda copy, name=name, damage=damage: damage(copy / name), number % 10 == 3)


def test_disk(number, training, tmp_path, rng, begin):
  # A limit on the size of the files that the process may write makes the disk full.
  workdir = tmp_path / "run"
  with training.started(workdir) as run:
    step = rng.choice((20, 40, 60))
    run.until(lambda: kept(workdir) >= step)
    for pid in run.pids():
      _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
      resource.prlimit(pid, resource.RLIMIT_FSIZE, (2**16, most))
    status = run.wait()
  steps = list_steps(workdir / "checkpoints")
  begin(f"full after step {max(steps, default=0)}")
  assert status == 2, run.err()
  messages = training.messages(run)
  assert len(messages) == 1 and messages[0].startswith("error: cannot write a checkpoint in "), (
    messages
  )
  assert steps and all(digests(workdir, step) for step in steps)
  assert training.to_its_end(workdir) == []
