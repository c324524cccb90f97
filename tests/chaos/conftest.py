"""The training that all faults disturb, and the record of each try."""

import random

import pytest

from chaos.table import FAULTS
from chaos.training import Training


def pytest_generate_tests(metafunc):
  """Runs `test_NAME(number)` as often as its fault says, short or long."""
  if "number" in metafunc.fixturenames:
    fault = FAULTS[metafunc.function.__name__.removeprefix("test_")]
    times = getattr(fault, metafunc.config.option.faults)
    metafunc.parametrize("number", range(times))


@pytest.fixture(scope="session")
def training(tmp_path_factory) -> Training:
  return Training(tmp_path_factory.mktemp("training"))


@pytest.fixture
def rng(request) -> random.Random:
  """Returns random numbers that are a function of the test's name."""
  return random.Random(request.node.name)


@pytest.fixture
def begin(record_property):
  """Records a try, `begin("bit 7 of FILE")`; returns the dict for its figures.

  The try that was begun last has failed if the test fails.
  """
  tries = []
  record_property("tries", tries)

  def begin(what: str) -> dict[str, float | bool]:
    tries.append(dict(what=what, problem="", figures={}))
    return tries[-1]["figures"]

  return begin
