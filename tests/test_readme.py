"""Tests that the examples of README and docs run."""

import configparser
import importlib
import pathlib
import re
import runpy
import shlex
from typing import get_args

import numpy as np
import pytest
from flax import nnx

from experiments import command, sweep
from experiments.systems import find_system, parse_config
from relpos_jax import nn
from relpos_jax.nn.schemes import PositionsName

ROOT = pathlib.Path(__file__).parents[1]
FILES = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
PAGES = {file.stem: file.read_text("utf-8") for file in FILES}
EXAMPLES = [page for page in PAGES if "```py" in PAGES[page]]
COMMANDS = [page for page in PAGES if "python -m experiments" in PAGES[page]]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
SCHEMES = re.findall(r"(?m)^\| (.*?) \| `(attend\(.*?\))` \|", PAGES["schemes"])


def code_of(page):
  return re.findall(r"^```python\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


def blocks_of_pages():
  """Returns each block of Python that a reader may copy, by page and number."""
  result = []
  for page in EXAMPLES:
    blocks = code_of(page)
    assert len(blocks) == PAGES[page].count("```py")
    for number, block in enumerate(blocks, start=1):
      # The page of published models says that its functions need the first block.
      before = blocks[0] if page == "published" else ""
      result.append(pytest.param(before + block, id=f"{page}-{number}"))
  return result


@pytest.mark.parametrize("code", blocks_of_pages())
def test_a_block_runs_as_it_stands(code, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # some write files
  exec(code, {})


@pytest.fixture(scope="module")
def names_of_schemes():
  names = {}
  for block in code_of("schemes"):
    exec(block, names)
  return names


@pytest.mark.parametrize("scheme, line", SCHEMES)
def test_the_line_of_a_scheme_runs(scheme, line, names_of_schemes):
  output = eval(line, names_of_schemes)
  assert output.size % names_of_schemes["v"].size == 0
  assert np.isfinite(output).all()


@pytest.mark.parametrize(
  "scheme, first, last, factor", [("Llama 3.1", 1, 4, 8), ("YaRN", 1, 32, 4)]
)
def test_the_frequencies_of_a_scheme(scheme, first, last, factor, names_of_schemes):
  """Follows YaRN's section 3.2 and Llama's code, a frequency at a time."""
  name, line = next(x for x in SCHEMES if x[0].startswith(scheme))
  length = int(re.search(r"from ([\d,]+) tokens", name)[1].replace(",", ""))
  call = re.search(r"rotated\(.*?\)\)(?=[,)])", line)[0]
  found = eval(call, names_of_schemes | dict(rotated=lambda frequencies: frequencies))
  for new, old in zip(found, names_of_schemes["f"], strict=True):
    rotations = length * old / (2 * np.pi)
    share = np.interp(rotations, [first, last], [0, 1])
    np.testing.assert_allclose(new, (1 - share) * old / factor + share * old, rtol=1e-5)


def test_the_table_of_positions_has_all_schemes_and_modules_that_run():
  table = r"(?m)^\| `(\w+)`.*\| (?:`(.*)` )?\|$"
  modules = dict(re.findall(table, PAGES["positions"]))
  assert modules.keys() == {*get_args(PositionsName)}
  rngs = nnx.Rngs(0)
  for module in filter(None, modules.values()):
    positions = eval(module, vars(nn) | dict(rngs=rngs))
    options = dict(attention_fn=nn.RelativeAttention(positions=positions), decode=False)
    layer = nnx.MultiHeadAttention(8, 512, rngs=rngs, **options)
    assert np.isfinite(layer(np.ones((1, 4, 512), np.float32))).all()


@pytest.mark.parametrize("page", COMMANDS)
def test_the_commands_of_a_page_exist(page):
  commands = re.findall(r"python -m\s+experiments\.(\w+)([^`\n]*)", PAGES[page])
  assert commands
  for name, arguments in commands:
    module = importlib.import_module(f"experiments.{name}")
    if hasattr(module, "__path__"):
      module = importlib.import_module(f"experiments.{name}.__main__")
    flags = module.FLAGS
    if name == "benchmark":
      flags = module.COMMANDS.get(arguments.strip().partition(" ")[0], flags)
    assert {*flags} >= {*re.findall(r"--(\w+)", arguments)}, f"{name}{arguments}"
    for file in re.findall(r"configs/\w+\.py", arguments):
      assert (ROOT / file).exists()


GRAPHS = dict(test=50, valid=50, train=400)
PAIRS = dict(train=5000, valid=200, long=200, test=200)
SCALES = dict(train=60, valid=6, test=6)
TABLES = {("test", 200), ("long", 200), ("valid", 6), ("test", 6)}
TABLES |= {("valid", 50), ("test", 50)}


def commands_of(page):
  """Yields the name and the flags of each command of a page."""
  pattern = r"python -m experiments\.(\w+) ((?:.*\\\n)*.*)"
  for name, arguments in re.findall(pattern, PAGES[page]):
    words = shlex.split(arguments.replace("\\\n", " "))
    module = importlib.import_module(f"experiments.{name}")
    yield name, command.parse(module.FLAGS, words)


def test_the_commands_of_the_page_on_data_find_what_it_writes(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").symlink_to(ROOT / "configs")
  for block in code_of("data"):
    exec(block, {})
  sizes = {}
  for name, values in commands_of("data"):
    if name == "train":
      config = parse_config(values["config"])
      splits = find_system(config.task).load_data(config).splits
      counts = {split: len(examples) for split, examples in splits.items()}
      sizes[values["workdir"].name] = counts
    elif name == "sweep":
      cells = sweep.plan_runs(values["config"], values["seeds"], values["out"])
      assert values["only"] in [cell.configuration for cell in cells]
    else:
      assert values["workdir"].name in sizes  # trained further up
  assert sizes == dict(backwards=PAIRS, scales=SCALES, json=GRAPHS, tu=GRAPHS)
  tables = re.findall(r"(?m)^(\w+) +(\d+) +[\d.]+ ", PAGES["data"])
  assert {(split, int(number)) for split, number in tables} == TABLES


@pytest.mark.parametrize(
  "page, name",
  [
    ("operator", "relpos_jax"),
    ("nn", "relpos_jax.nn"),
    ("linen", "relpos_jax.linen"),
  ],
)
def test_a_page_of_the_api_lists_all_public_names(page, name):
  text = (ROOT / f"docs/api/{page}.md").read_text("utf-8")
  _, _, members = text.partition("members:")
  public = importlib.import_module(name).__all__
  assert {*re.findall(r"\w+", members)} == {*public}


def test_some_pages_have_examples_and_commands():
  assert len(SCHEMES) == PAGES["schemes"].count("| `") >= 30
  assert len(EXAMPLES) >= 5
  assert {"README", "train"} <= {*EXAMPLES} & {*COMMANDS}


def test_the_page_of_the_package_has_no_relative_links(monkeypatch):
  setuptools = pytest.importorskip("setuptools")
  arguments = {}
  monkeypatch.setattr(setuptools, "setup", lambda **options: arguments.update(options))
  runpy.run_path(str(ROOT / "setup.py"))
  page = arguments["long_description"]
  links = re.findall(r"\]\((.*?)\)", page)
  assert len(links) == len(re.findall(r"\]\(", PAGES["README"])) >= 25
  assert not [link for link in links if not link.startswith("https://")]
  assert "/blob/main/docs/operator.md)" in page
  assert "/raw/main/docs/idea.svg)" in page


def test_the_first_steps_clone_from_the_address_of_the_package():
  for page in (PAGES["README"], CONTRIBUTING):
    assert f"git clone {SETUP['metadata']['url']} " in page


def test_the_marked_tests_are_listed():
  markers = re.findall(r"^(\w+):", SETUP["tool:pytest"]["markers"], re.MULTILINE)
  listed = re.findall(r"^\| `.*pytest -m (\w+)", CONTRIBUTING, re.MULTILINE)
  assert sorted(listed) == sorted(markers)


def test_the_version_has_a_heading_below_that_of_what_comes():
  text = (ROOT / "CHANGELOG.md").read_text("utf-8")
  headings = re.findall(r"^## (.*)", text, re.MULTILINE)
  version = SETUP["metadata"]["version"]
  assert headings[:2] == ["Unreleased", version]
  assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


def test_the_laws_are_numbered_and_their_tests_exist():
  numbers = re.findall(r"^\*\*(\d+)\. ", PAGES["laws"], re.MULTILINE)
  assert [*map(int, numbers)] == [*range(1, len(numbers) + 1)]
  tests = re.findall(r"^- `(.*)::(.*)`$", PAGES["laws"], re.MULTILINE)
  assert len(tests) == PAGES["laws"].count("::") - 1 > len(numbers)  # one is a command
  for file, name in tests:
    assert f"\ndef {name}(" in (ROOT / file).read_text("utf-8"), f"{file}::{name}"


def test_numbers_of_laws_in_tests_are_those_of_the_page():
  numbers = {*re.findall(r"^\*\*(\d+)\. ", PAGES["laws"], re.MULTILINE)}
  for file in (ROOT / "tests").rglob("test_*.py"):
    for cited in re.findall(r"\bLaws? ([\d, and]+)", file.read_text("utf-8")):
      assert {*re.findall(r"\d+", cited)} <= numbers, f"{file.name}: law {cited}"
