"""A run that resumes on other devices or processes: the same state, the same data."""

import pathlib

import pytest

from chaos.run import losses, state_digests
from chaos.training import DISTURBED

pytestmark = pytest.mark.chaos

_MOVES = (("devices", 8, 4), ("processes", 2, 1), ("devices", 4, 2), ("processes", 1, 2))
_MOVES += (("devices", 2, 8),)
_STEPS = 10  # on each mesh


@pytest.fixture(scope="module")
def unmoved(training, tmp_path_factory) -> pathlib.Path:
  workdir = tmp_path_factory.mktemp("unmoved") / "run"
  _train(training, workdir, 2 * _STEPS, devices=8)
  return workdir


def _train(training, workdir: pathlib.Path, num_steps: int, **devices: int) -> None:
  """Saves the last step, and the first of the second part, which is skipped: it changes nothing."""
  flags = [f"--config.training.num_steps={num_steps}", "--config.training.keep_checkpoints=9"]
  flags += [f"--config.training.save_every={_STEPS + (num_steps > _STEPS)}", f"--nan={_STEPS}"]
  with training.launched(
    workdir, *flags, f"--order={_order(workdir)}", program=DISTURBED, **devices
  ) as run:
    assert run.wait() == 0, run.err()


def _order(workdir: pathlib.Path) -> pathlib.Path:
  return workdir.with_name("order")


def test_devices(number, training, unmoved, tmp_path, begin):
  kind, before, after = _MOVES[number]
  figures, workdir = begin(f"from {before} to {after} {kind}"), tmp_path / "run"
  _train(training, workdir, _STEPS, **{kind: before})
  saved = state_digests(workdir, _STEPS)
  _train(training, workdir, 2 * _STEPS, **{kind: after})
  assert saved == state_digests(workdir, _STEPS + 1)
  order, wanted = ({*_order(run).read_text().splitlines()} for run in (workdir, unmoved))
  assert order <= wanted, "the pairs of a batch differ"
  assert {int(line.split()[0]) for line in order} >= {*range(2 * _STEPS)}
  ours, theirs = losses(workdir), losses(unmoved)
  assert [*ours] == [*theirs] == [*range(1, 2 * _STEPS + 1)]
  assert ours.pop(_STEPS + 1) is None is theirs.pop(_STEPS + 1)
  figures["losses apart"] = max(abs(ours[step] - theirs[step]) for step in ours)
  assert figures["losses apart"] < 1e-4  # sums in another order
