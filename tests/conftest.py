"""Eight simulated devices for every test, and data: the real sets, or files at an address."""

import contextlib
import functools
import gc
import http.server
import os
import pathlib
import signal
import threading
from collections.abc import Iterator

import hypothesis
import jax
import pytest
from chaos.table import Recorder
from compiling import QUICK

jax.config.update("jax_num_cpu_devices", 8)
hypothesis.settings.register_profile("same every time", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same every time")
# What tracing leaves is mostly in use still: to look through all of it so often is 6 % of the time.
gc.set_threshold(20_000)

_SHARED_DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"


def pytest_addoption(parser):
  """Adds the options of `pytest -m chaos`."""
  group = parser.getgroup("chaos")
  group.addoption("--faults", choices=("short", "long"), default="short", help="how many tries")
  group.addoption("--faults_out", metavar="FOLDER", help="write faults.json and faults.md there")


def pytest_configure(config):
  """Compiles quickly for the host. What a test says of a GPU's or TPU's program, users run.

  Interrupts are heard, as in a terminal: in a script's background they would be ignored.
  """
  if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
  if "not gpu and not tpu" in config.option.markexpr:
    flags = [f"--{name}={str(value).lower()}" for name, value in QUICK.items()]
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *flags])
  if config.option.faults_out and not hasattr(config, "workerinput"):
    recorder = Recorder(config.option.faults_out, config.invocation_params.args)
    config.pluginmanager.register(recorder)


@pytest.fixture
def shared_data() -> pathlib.Path:
  """The folder of real data sets; the test is skipped for users who do not have it."""
  if not _SHARED_DATA.is_dir():
    pytest.skip(f"no data sets in {_SHARED_DATA}")
  return _SHARED_DATA


@pytest.fixture
def float64():
  """Arrays of float64: pytestmark = pytest.mark.usefixtures("float64")."""
  with jax.enable_x64(True):
    yield


@pytest.fixture
def data_dir(tmp_path, monkeypatch) -> pathlib.Path:
  """Where TFDS keeps what it prepares; not there yet."""
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
  return tmp_path / "tfds"


@pytest.fixture
def serve():
  """A context in which a folder's files are at an address: `with serve(folder) as url`."""
  return _serve


@contextlib.contextmanager
def _serve(folder: pathlib.Path) -> Iterator[str]:
  handler = functools.partial(_Quiet, directory=str(folder))
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
  def log_message(self, *args):
    pass
