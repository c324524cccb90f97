"""The page on users' own data: what it writes is read, and its commands are those that it shows."""

import pathlib
import re
import shlex

import pytest

from experiments import command, evaluate, sample, sweep, train, translate
from experiments.run import parse_config

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "docs/data.md").read_text("utf-8")
MODULES = dict(train=train, evaluate=evaluate, translate=translate, sample=sample, sweep=sweep)
COMMANDS = re.findall(r"python -m experiments\.(\w+) ((?:.*\\\n)*.*)", TEXT)


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """Changes to a folder with the data that the page writes, and the configs."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").symlink_to(ROOT / "configs")
  for block in re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
    exec(block, {})
  return tmp_path


def test_the_commands_of_the_page_find_its_data(folder):
  sizes = {}
  for name, arguments in COMMANDS:
    words = shlex.split(arguments.replace("\\\n", " "))
    values = command.parse(MODULES[name].FLAGS, words)
    if name == "train":
      data = parse_config(values["config"]).load_data()
      sizes[values["workdir"].name] = {split: len(of) for split, of in data.splits.items()}
    elif name == "sweep":
      cells = sweep.plan_cells(values["config"], values["seeds"], values["out"])
      assert values["only"] in [cell.row for cell in cells]
    else:
      assert values["workdir"].name in sizes  # trained further up
  graphs = dict(test=50, valid=50, train=400)
  pairs = dict(train=5000, valid=200, long=200, test=200)
  scales = dict(train=60, valid=6, test=6)
  assert sizes == dict(backwards=pairs, scales=scales, json=graphs, tu=graphs)
  tables = re.findall(r"^(\w+) +(\d+) +[\d.]+ ", TEXT, re.MULTILINE)
  assert {(split, int(number)) for split, number in tables} == {
    *(("test", 200), ("long", 200), ("valid", 6), ("test", 6), ("valid", 50), ("test", 50))
  }
