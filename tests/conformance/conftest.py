"""Chooses the implementation, and records its results."""

import datetime
import importlib
import importlib.metadata
import json
import pathlib

import cases
import pytest

OURS = "adapters.relpos_jax:attend"
collect_ignore = ["adapters"]  # they import what need not be installed


def pytest_addoption(parser):
  parser.addoption(
    "--attend", default=OURS, metavar="MODULE:FUNCTION", help="what is tested"
  )
  parser.addoption("--dtype", default="float32", choices=["float32", "float64"])
  parser.addoption("--record", metavar="FILE", help="write the results, as JSON")


@pytest.fixture(scope="session")
def attend(request):
  """Returns the function under test; ours where a larger run has no such option."""
  module, name = request.config.getoption("--attend", OURS).split(":")
  return getattr(importlib.import_module(module), name)


@pytest.fixture(scope="session")
def dtype(request):
  return request.config.getoption("--dtype", "float32")


def pytest_configure(config):
  file = config.getoption("--record", None)
  if file:
    config.pluginmanager.register(Record(config, pathlib.Path(file)))


class Record:
  """Writes a verdict for each case: pass, refused, raises or wrong."""

  def __init__(self, config, file):
    self.config, self.file = config, file
    self.verdicts = {}

  def pytest_runtest_logreport(self, report):
    result = dict(report.user_properties)
    if report.when == "call" and "case" in result:
      self.verdicts[result.pop("case")] = result

  def pytest_sessionfinish(self):
    if len(self.verdicts) < len(cases.CASES):
      print(f"{self.file} is not written: not every case was run.")
      return
    name = self.config.getoption("--attend")
    module = importlib.import_module(name.split(":")[0])
    packages = getattr(module, "PACKAGES", ())
    versions = {package: importlib.metadata.version(package) for package in packages}
    record = {
      "date": datetime.date.today().isoformat(),
      "attend": name,
      "dtype": self.config.getoption("--dtype"),
      "versions": versions,
      "cases": self.verdicts,
    }
    self.file.write_text(json.dumps(record, indent=1) + "\n")
