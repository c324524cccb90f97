"""Eight simulated devices for every test, and fixtures for data sets."""

import contextlib
import ctypes
import functools
import gc
import hashlib
import http.server
import os
import pathlib
import signal
import threading
from collections.abc import Iterator

import hypothesis
import jax
import pytest
from compiling import QUICK

from experiments.data import upstream

jax.config.update("jax_num_cpu_devices", 8)
# Commands, here and in processes of their own, neither use nor fill a person's folder.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
# The default: commands leave the tests' memory as it is.
os.environ["MALLOC_ARENA_MAX"] = "0"
hypothesis.settings.register_profile("same every time", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same every time")
# Collecting more often takes 6% of the time: most of what tracing leaves is in use.
gc.set_threshold(20_000)

_STATM = pathlib.Path("/proc/self/statm")  # the second number counts pages in memory
_SHARED_DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"


def pytest_addoption(parser):
  parser.addoption(
    "--published_out", metavar="FOLDER", help="measure memory; write a record there"
  )


def pytest_xdist_auto_num_workers(config) -> int:
  """Returns one worker for each core, and fewer where memory is short.

  Each takes up to 1.6 GB.
  """
  memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return max(1, min(os.cpu_count(), int(memory / 2e9)))


class DropPrograms:
  """Drops compiled programs after each file, and on Linux above 1.2 GB."""

  def pytest_collection_finish(self):
    # Collections after each file pass over what importing has left, which stays.
    gc.collect()
    gc.freeze()

  @pytest.hookimpl(trylast=True)
  def pytest_runtest_teardown(self, item, nextitem):
    if nextitem and nextitem.path == item.path and _resident_bytes() < 1.2e9:
      return
    jax.clear_caches()
    gc.collect()
    if _STATM.exists():
      # glibc keeps what is freed: three quarters of a worker's memory.
      ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
  """Returns the memory of this process, on Linux; elsewhere 0."""
  if not _STATM.exists():
    return 0
  _, pages, *_ = _STATM.read_text().split()
  return int(pages) * os.sysconf("SC_PAGE_SIZE")


def pytest_configure(config):
  """Compiles quickly for the host, and as users do for GPUs and TPUs."""
  # In the background of a script, interrupts are ignored, and tests send some.
  if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
  if "not gpu and not tpu" in config.option.markexpr:
    flags = [f"--{name}={str(value).lower()}" for name, value in QUICK.items()]
    before = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join([*before, *flags])
  # A hook of this file would miss the doctests.
  config.pluginmanager.register(DropPrograms())


@pytest.fixture
def shared_data() -> pathlib.Path:
  """Returns the folder of real data sets; the test is skipped where there is none."""
  if not _SHARED_DATA.is_dir():
    pytest.skip(f"no data sets in {_SHARED_DATA}")
  return _SHARED_DATA


@pytest.fixture(scope="module")
def in_the_repository(request):
  """Changes to the repository's folder, so that tests can name configs as users do."""
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(request.config.rootpath)
    yield


@pytest.fixture
def float64():
  with jax.enable_x64(True):
    yield


@pytest.fixture
def kept(tmp_path, monkeypatch) -> pathlib.Path:
  """Returns the folder, not made yet, in which downloads of data sets are kept."""
  monkeypatch.setattr(upstream, "CACHE", str(tmp_path / "kept"))
  return tmp_path / "kept"


@pytest.fixture
def publish(kept, monkeypatch):
  """Returns a function that publishes the files of a folder as an `Upstream`."""

  def publish(
    module, name: str, folder: pathlib.Path, url: str = "http://127.0.0.1:9/"
  ) -> None:
    before = getattr(module, name)
    sums = dict(before.files)
    for file in filter(pathlib.Path.is_file, folder.iterdir()):
      sums[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(module, name, before._replace(url=url, files=sums))

  return publish


@pytest.fixture
def cache(tmp_path) -> Iterator[pathlib.Path]:
  """Has JAX keep programs in a folder, which is returned."""
  names = "jax_enable_compilation_cache", "jax_compilation_cache_dir"
  before = [getattr(jax.config, name) for name in names]
  for name, value in zip(names, (True, str(tmp_path)), strict=True):
    jax.config.update(name, value)
  yield tmp_path
  for name, value in zip(names, before, strict=True):
    jax.config.update(name, value)


@pytest.fixture
def serve():
  """Returns a context that serves a folder by HTTP: `with serve(folder) as url`."""

  class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
      pass

  @contextlib.contextmanager
  def serve(folder: pathlib.Path) -> Iterator[str]:
    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
      thread = threading.Thread(target=server.serve_forever, args=(0.01,))
      thread.start()
      yield f"http://127.0.0.1:{server.server_port}/"
      server.shutdown()
      thread.join()

  return serve
