"""SIGTERM and SIGINT stop once, and their handlers are restored."""

import contextlib
import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from experiments.training.processes import StopOnSignal, Stopped

ROOT = pathlib.Path(__file__).parents[2]
# Its main thread stays in compiled code, as in a compilation that takes long.
ENDLESS = """
import jax
from experiments.training.processes import StopOnSignal

endless = jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 1, lambda x: x / 2, x))
with StopOnSignal() as stop:
  stop.deferred = True
  print("ready", flush=True)
  endless(0.5).block_until_ready()
"""


def terminate(*_):
  signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def before():
  def handler(*_):
    pass

  numbers = signal.SIGTERM, signal.SIGHUP
  old = {number: signal.signal(number, handler) for number in numbers}
  yield
  for number in numbers:
    signal.signal(number, old[number])


TWO_SIGNALS = (
  (signal.SIGTERM, signal.SIGTERM),
  (signal.SIGHUP, signal.SIGHUP),
  (signal.SIGINT, signal.SIGTERM),  # which a launcher passes on
)


@pytest.mark.parametrize("first, second", TWO_SIGNALS)
@pytest.mark.parametrize("waits", [False, True])
def test_one_signal_stops_a_second_changes_nothing_and_the_handler_is_put_back(
  waits, first, second, before
):
  handler = signal.getsignal(first)
  with StopOnSignal() as stop:
    stop.deferred = waits
    with contextlib.nullcontext() if waits else pytest.raises(Stopped):
      signal.raise_signal(first)
    signal.raise_signal(second)  # is ignored, so that the first one's save ends
    assert stop.should_stop()
    assert stop.stopping
    assert stop.signal == first
  assert signal.getsignal(first) == handler


def test_a_signal_that_is_ignored_stays_ignored(before):
  signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by nohup
  with StopOnSignal() as stop:
    signal.raise_signal(signal.SIGHUP)
    assert not stop.should_stop()


def test_what_may_be_cut_short_is(before):
  with StopOnSignal() as stop:
    stop.deferred = True
    with stop.interruptible():
      # As a library does that cannot read its cache.
      with contextlib.suppress(Exception):
        terminate()
      pytest.fail("the block goes on")
    assert stop.deferred
    assert stop.stopping


def test_no_signal_raises_in_a_callback_of_gc_which_would_show_and_drop_it(before):
  with StopOnSignal() as stop:
    gc.callbacks.append(terminate)
    try:
      gc.collect()
    finally:
      gc.callbacks.remove(terminate)
    with pytest.raises(Stopped):  # the next one is not lost
      terminate()
    assert stop.should_stop()


def test_an_interrupt_is_answered_at_once_and_a_second_exits():
  pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  env = os.environ | dict(JAX_PLATFORMS="cpu")
  words = [sys.executable, "-c", ENDLESS]
  with subprocess.Popen(words, cwd=ROOT, env=env, **pipes) as process:
    limit = threading.Timer(60, process.kill)
    limit.start()
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    answer = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    limit.cancel()
  again = "Ctrl-C again exits at once"
  assert answer == f"stopping after this step or compilation; {again}\n"
