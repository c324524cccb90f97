"""Damaged checkpoints: the right values are restored, or those of the step before."""

import pathlib
import re
import shutil

import numpy as np
import pytest

from chaos.run import kept, shapes
from experiments.training.checkpoint import Checkpoints

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def like(training):
  return shapes(training.undisturbed(), 100)


@pytest.fixture(scope="module")
def saved(training, like):
  with Checkpoints(training.undisturbed() / "checkpoints") as checkpoints:
    return {step: _octets(checkpoints.restore(step, like=like)) for step in (80, 100)}


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


@pytest.mark.parametrize("how", ["80 over 100", "100 over 80", "80 and 100 swapped"])
def test_swapped(how, training, tmp_path, begin):
  begin(how)
  folder = training.copy(tmp_path / "run") / "checkpoints"
  (folder / "80").rename(tmp_path / "80"), (folder / "100").rename(tmp_path / "100")
  is_swap = how.endswith("swapped")
  shutil.copytree(tmp_path / ("100" if is_swap or how.endswith("80") else "80"), folder / "80")
  shutil.copytree(tmp_path / ("80" if is_swap or how.endswith("100") else "100"), folder / "100")
  wrong = {"80 over 100": [100], "100 over 80": [80]}.get(how, [80, 100])
  found = training.checkpoints(tmp_path / "run", "--verify")
  rows = re.findall(r"^ *(\d+) .* bytes  damaged", found.stdout, re.MULTILINE)
  assert sorted(map(int, rows)) == wrong and found.returncode == 1 and found.stderr == ""
  messages = training.to_its_end(tmp_path / "run")
  read = [step for step in reversed(wrong) if 100 in wrong]
  assert [line.partition(" is damaged: ")[0] for line in messages] == [
    f"checkpoint {folder}/{step}" for step in read
  ]
  assert kept(tmp_path / "run") == 100
