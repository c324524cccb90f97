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


def terminate(number=signal.SIGTERM):
  signal.raise_signal(number)


@pytest.fixture
def before():
  def handler(*_):
    pass

  numbers = signal.SIGTERM, signal.SIGHUP
  old = {number: signal.signal(number, handler) for number in numbers}
  yield handler
  for number in numbers:
    signal.signal(number, old[number])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("waits", [False, True])
def test_one_signal_stops_a_second_changes_nothing_and_the_handler_is_put_back(
  waits, number, before
):
  with StopOnSignal() as stop:
    stop.deferred = waits
    if waits:
      terminate(number)
    else:
      with pytest.raises(Stopped):
        terminate(number)
    terminate(number)  # is ignored, so that the first one's save ends
    assert stop.should_stop() and stop.stopping and stop.signal == number
  assert signal.getsignal(number) == before


def test_a_signal_that_is_ignored_stays_ignored(before):
  signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by nohup
  with StopOnSignal() as stop:
    terminate(signal.SIGHUP)
    assert not stop.should_stop()


def test_what_may_be_cut_short_is(before):
  with StopOnSignal() as stop:
    stop.deferred = True
    with stop.interruptible():
      with contextlib.suppress(
        Exception
      ):  # as a library does whose cache cannot be read
        terminate()
      pytest.fail("the block goes on")
    assert stop.deferred and stop.stopping


def test_no_signal_raises_in_a_callback_of_gc_which_would_show_and_drop_it(before):
  callback = lambda *_: terminate()
  with StopOnSignal() as stop:
    gc.callbacks.append(callback)
    try:
      gc.collect()
    finally:
      gc.callbacks.remove(callback)
    with pytest.raises(Stopped):  # the next one is not lost
      terminate()
    assert stop.should_stop()


def test_an_interrupt_that_a_launcher_passes_on_too_stops_once(before):
  interrupts = signal.getsignal(signal.SIGINT)
  with StopOnSignal() as stop:
    with pytest.raises(Stopped):
      signal.raise_signal(signal.SIGINT)
    terminate()
    assert stop.signal == signal.SIGINT and stop.should_stop()
  assert signal.getsignal(signal.SIGINT) == interrupts


def test_an_interrupt_is_answered_at_once_and_a_second_exits():
  root = pathlib.Path(__file__).parents[2]
  pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  env = os.environ | dict(JAX_PLATFORMS="cpu")
  with subprocess.Popen(
    [sys.executable, "-c", ENDLESS], cwd=root, env=env, **pipes
  ) as process:
    limit = threading.Timer(60, process.kill)
    limit.start()
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    answer = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    limit.cancel()
  assert (
    answer == "stopping after this step or compilation; Ctrl-C again exits at once\n"
  )
