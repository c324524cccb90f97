"""What the tests of the operator share."""

import jax
import pytest


@pytest.fixture
def float64():
  """Arrays of float64: pytestmark = pytest.mark.usefixtures("float64")."""
  with jax.enable_x64(True):
    yield
