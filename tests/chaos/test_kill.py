"""SIGKILL and SIGTERM, to a run of one process and of two."""

import os
import random
import re
import signal
import time

import pytest

from chaos.run import Run, digests, is_alive, kept, reached, wait_until
from chaos.training import DISTURBED, NUM_STEPS, SAVE_EVERY
from experiments.training.checkpoint_reader import list_damaged

pytestmark = pytest.mark.chaos

_MOMENTS = (("start", "save"), ("save", "train"), ("train", "save"), ("save", "end"))
_MOMENTS += (("train", "end"),)


def test_kill(number, training, tmp_path, rng, begin):
  workdir = tmp_path / "run"
  with training.launched(workdir, retries=2) as run:
    for kill, moment in enumerate(_MOMENTS[number % len(_MOMENTS)]):
      _wait_for(moment, run, rng, first=kill == 0)
      _kill(run, begin)
    assert run.wait() == 0, run.err()
  training.check_end(workdir)
  assert not list_damaged(workdir / "checkpoints")
  assert training.messages(run) == [f"exit status 137: retry {i} of 2" for i in (1, 2)]


def _wait_for(moment: str, run: Run, rng: random.Random, first: bool) -> None:
  """Waits for a moment, the first time early enough for a save before the second."""
  if moment == "start":
    end = time.monotonic() + rng.uniform(0, 6)
    run.until(lambda: run.has_stepped() or time.monotonic() > end)
  elif moment == "save":
    run.until(run.is_saving)
    time.sleep(rng.uniform(0, 0.2))
  else:
    step = NUM_STEPS if moment == "end" else rng.randrange(70 if first else NUM_STEPS)
    run.until(lambda: run.has_stepped() and reached(run.workdir) >= step)
    time.sleep(rng.uniform(0, 0.5) if moment == "end" else 0)


def _kill(run: Run, begin) -> None:
  run.until(run.pids)  # The launcher may be about to start it.
  (pid,) = run.pids()
  os.kill(pid, signal.SIGKILL)
  wait_until(lambda: not is_alive(pid), 10)
  safe = kept(run.workdir)
  last = reached(run.workdir) if run.has_stepped() else safe
  is_saving = last - last % SAVE_EVERY > safe
  figures = begin(f"killed at step {last}, {'during the save' if is_saving else 'between saves'}")
  figures["steps lost" + ", with those during the save" * is_saving] = last - safe
  # An interval, and the steps beside the save under way: the next save waits for that one.
  assert last - safe <= 2 * SAVE_EVERY
  run.since = time.time()


def test_term(number, training, tmp_path, rng, begin):
  # Two processes end an evaluation together: they are not disturbed during it.
  workdir, processes = tmp_path / "run", 1 + number % 2
  training.undisturbed(processes=processes)
  with training.launched(workdir, processes=processes) as run:
    step = rng.randint(1, NUM_STEPS if processes == 1 else 80)
    run.until(lambda: reached(workdir) >= step)
    time.sleep(rng.uniform(0, 0.5) if step == NUM_STEPS else 0)
    pids = run.pids()
    whom = rng.choice([run.processes[0].pid, *pids])
    sent = time.monotonic()
    os.kill(whom, signal.SIGTERM)
    status = run.wait()
    seconds = time.monotonic() - sent
  last = reached(workdir)
  named = f"process {pids.index(whom)}" if whom in pids else "the launcher"
  begin(f"SIGTERM to {named} of {processes} at step {last}")["seconds"] = seconds
  assert status == 143, run.err()
  assert last == kept(workdir) and digests(workdir, last)
  says = rf"^stopped by SIGTERM( at step {last})?: run the same command again to resume$"
  assert re.search(says, run.out(), re.MULTILINE), run.out()
  assert processes > 1 or training.messages(run) == []
  assert seconds <= 10
  messages = training.to_its_end(workdir, processes=processes)
  assert processes > 1 or messages == []


def test_workers(number, training, tmp_path, rng, begin):
  # Half as on a cluster, where only JAX reports the death of the other; half with the launcher.
  workdir, victim, is_launched = tmp_path / "run", number // 2 % 2, number % 2
  training.undisturbed(processes=2)
  start = training.launched if is_launched else training.started
  with start(workdir, processes=2, **dict(retries=1) if is_launched else {}) as run:
    step = rng.randint(1, 80)
    run.until(lambda: reached(workdir) >= step)
    pids = run.pids()
    os.kill(pids[victim], signal.SIGKILL)
    died = time.monotonic()
    last, safe = reached(workdir), kept(workdir)
    how = "under the launcher" if is_launched else "as on a cluster"
    figures = begin(f"process {victim} killed at step {last}, {how}")
    wait_until(lambda: not any(map(is_alive, pids)), 60)
    figures |= {f"seconds, {how}": time.monotonic() - died, "steps lost": last - safe}
    assert len(pids) == 2 and time.monotonic() - died <= 15
    if is_launched:
      assert run.wait() == 0, run.err()
  if is_launched:
    training.check_end(workdir, processes=2)
  else:
    training.to_its_end(workdir, processes=2)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.source.json"])
def test_vocabulary(file, training, tmp_path, begin):
  workdir = tmp_path / "run"
  separate = "--config.vocabulary.joint=False", "--config.model.share_embeddings=False"
  begin(f"killed once {file} was written")
  with training.started(workdir, *separate, f"--kill_at={file}", program=DISTURBED) as run:
    assert run.wait() == -signal.SIGKILL, run.err()
  assert (workdir / file).exists()
  assert training.to_its_end(workdir, *separate) == []
