"""SIGKILL, while it starts, trains and saves: the launcher starts it again, and nothing changes."""

import os
import pathlib
import random
import signal
import time
from collections.abc import Iterator

from experiments.faults.outcome import kept, reached
from experiments.faults.running import Running
from experiments.faults.subject import SAVE_EVERY, Subject
from experiments.faults.tries import ENDLESS, Try, joined, one_start, until_done

_LONGEST_START, _LONGEST_LIFE = 10.0, 1.5  # seconds: of a start, and of training after it
_LONGEST_WAIT = 0.2  # seconds into a save


def kill(subject: Subject, rng: random.Random, tries: int) -> Iterator[Try]:
  """Kills runs of one process; about every other kill strikes a save."""
  counts = [0, 0]  # kills, and those during a save

  def strike(running: Running, _) -> Try | None:
    wait = _wait_for_a_save if 2 * counts[1] <= counts[0] else _wait_anywhere
    return _kill(running, counts) if wait(running, rng) else None

  def disturb(workdir: pathlib.Path, most: int) -> Iterator[Try]:
    return one_start(lambda: subject.launched(workdir, retries=ENDLESS), most, strike)

  yield from until_done(subject, "killed", tries, subject.undisturbed(), disturb)


def _wait_anywhere(running: Running, rng: random.Random) -> bool:
  """Into a start, or into training after it; returns whether the training was there still."""
  starts = rng.random() < 0.5
  seconds = rng.uniform(0, _LONGEST_START if starts else _LONGEST_LIFE)
  return (
    running.wait_seconds(seconds) if starts else running.wait_from(running.has_stepped, seconds)
  )


def _wait_for_a_save(running: Running, rng: random.Random) -> bool:
  """Into the first save or the second; returns whether it came."""
  num_saves, wait = rng.randint(1, 2), rng.uniform(0, _LONGEST_WAIT)
  for _ in range(num_saves - 1):
    running.wait_for(running.is_saving)
    running.wait_for(lambda: not running.is_saving())
  is_there = running.wait_for(running.is_saving)
  time.sleep(wait)
  return is_there


def _kill(running: Running, counts: list[int]) -> Try:
  """Kills what trains, and says how much is lost."""
  born = running.since
  running.wait_for(running.pids)  # The launcher may be about to start it.
  for pid in running.pids():
    os.kill(pid, signal.SIGKILL)
  safe = kept(running.workdir)
  last = reached(running.workdir) if running.has_stepped() else safe
  due = last - last % SAVE_EVERY  # The save of this step is over, or has begun, or is about to.
  is_saving = due > safe
  counts[0] += 1
  counts[1] += is_saving
  running.since = time.time()
  where = f"in the save of step {due}" if is_saving else "between saves"
  return Try(
    f"killed {running.since - born:.1f} s after the kill before, at step {last}, {where}",
    # An interval, and the steps beside the save under way: the next one waits for that.
    joined({f"{last - safe} steps lost": last - safe > 2 * SAVE_EVERY}),
    {"steps lost" + ", with those during the save" * is_saving: last - safe},
  )
