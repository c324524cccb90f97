"""Chooses the implementation, and records its results."""

import collections
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
  words = request.config.getoption("--attend", OURS)
  module, _, name = words.partition(":")
  try:
    return getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError, ValueError) as error:
    pytest.exit(f"--attend={words}: {error}; want MODULE:FUNCTION", returncode=4)


@pytest.fixture(scope="session")
def dtype(request):
  return request.config.getoption("--dtype", "float32")


def pytest_configure(config):
  if config.getoption("--attend", None):
    config.pluginmanager.register(Record(config))


class Record:
  """Counts the verdicts pass, refused, raises and wrong, and may write them."""

  def __init__(self, config):
    self.config = config
    self.verdicts = {}
    file = config.getoption("--record")
    self.file = pathlib.Path(file) if file else None
    if file and not self.file.parent.is_dir():
      raise pytest.UsageError(f"--record={file}: there is no such folder")

  def pytest_runtest_logreport(self, report):
    result = dict(report.user_properties)
    if report.when == "call" and "case" in result:
      self.verdicts[result.pop("case")] = result

  def pytest_terminal_summary(self, terminalreporter):
    name = self.config.getoption("--attend")
    verdicts = [result["verdict"] for result in self.verdicts.values()]
    counts = collections.Counter(verdicts).items()
    numbers = ", ".join(f"{number} {verdict}" for verdict, number in counts)
    terminalreporter.write_line(f"{name}: {numbers}")
    if self.file and len(verdicts) < len(cases.CASES):
      terminalreporter.write_line(f"{self.file} is not written: not all cases were run")
    elif self.file:
      self._write(name)

  def _write(self, name):
    module = importlib.import_module(name.split(":")[0])
    versions = {}
    for package in getattr(module, "PACKAGES", ()):
      try:
        versions[package] = importlib.metadata.version(package)
      except importlib.metadata.PackageNotFoundError:
        versions[package] = "unknown"  # a module that is not installed
    record = {
      "date": datetime.date.today().isoformat(),
      "attend": name,
      "dtype": self.config.getoption("--dtype"),
      "versions": versions,
      "cases": self.verdicts,
    }
    self.file.write_text(json.dumps(record, indent=1) + "\n")
