"""Eight simulated devices for every test, and the real data sets where they are at hand."""

import gc
import os
import pathlib

import hypothesis
import jax
import pytest
from compiling import QUICK

jax.config.update("jax_num_cpu_devices", 8)
hypothesis.settings.register_profile("same every time", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same every time")
# What tracing leaves is mostly in use still: to look through all of it so often is 6 % of the time.
gc.set_threshold(20_000)

_SHARED_DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"


def pytest_configure(config):
  """Compiles quickly for the host. What a test says of a GPU's or TPU's program, users run."""
  if "not gpu and not tpu" in config.option.markexpr:
    flags = [f"--{name}={str(value).lower()}" for name, value in QUICK.items()]
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *flags])


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
