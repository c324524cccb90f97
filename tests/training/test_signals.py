"""SIGTERM and SIGINT stop once, and their handlers are restored."""

import contextlib
import signal

import pytest

from experiments.training.processes import StopOnSignal, Stopped


def terminate():
  signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def before():
  def handler(*_):
    pass

  old = signal.signal(signal.SIGTERM, handler)
  yield handler
  signal.signal(signal.SIGTERM, old)


@pytest.mark.parametrize("waits", [False, True])
def test_one_signal_stops_a_second_changes_nothing_and_the_handler_is_put_back(waits, before):
  with StopOnSignal() as stop:
    stop.deferred = waits
    if waits:
      terminate()
    else:
      with pytest.raises(Stopped):
        terminate()
    terminate()  # is ignored, so that the first one's save ends
    assert stop.should_stop() and stop.stopping
  assert signal.getsignal(signal.SIGTERM) == before


def test_what_may_be_cut_short_is(before):
  with StopOnSignal() as stop:
    stop.deferred = True
    with stop.interruptible():
      with contextlib.suppress(Exception):  # as a library does whose cache cannot be read
        terminate()
      pytest.fail("the block goes on")
    assert stop.deferred and stop.stopping


def test_an_interrupt_that_a_launcher_passes_on_too_stops_once_and_again_kills(before):
  interrupts = signal.getsignal(signal.SIGINT)
  with StopOnSignal() as stop:
    with pytest.raises(Stopped):
      signal.raise_signal(signal.SIGINT)
    terminate()
    assert stop.signal == signal.SIGINT and stop.should_stop()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
  assert signal.getsignal(signal.SIGINT) == interrupts
