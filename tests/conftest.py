"""Eight simulated devices for every test, and the real data sets where they are at hand."""

import pathlib

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
hypothesis.settings.register_profile("same every time", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same every time")

_SHARED_DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"


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
