"""Tests that the examples of README and docs run."""

import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {x.stem: x.read_text("utf-8") for x in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
EXAMPLES = [page for page in PAGES if "```py" in PAGES[page]]
COMMANDS = [page for page in PAGES if "python -m experiments" in PAGES[page]]


@pytest.mark.parametrize("page", EXAMPLES)
def test_the_examples_of_a_page_run(page):
  blocks = re.findall(r"^```python\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)
  assert len(blocks) == PAGES[page].count("```py")
  names = {}
  for block in blocks:
    exec(block, names)


@pytest.mark.parametrize("page", COMMANDS)
def test_the_commands_of_a_page_exist(page):
  commands = re.findall(r"python -m\s+experiments\.(\w+)([^`\n]*)", PAGES[page])
  assert commands
  for name, arguments in commands:
    module = importlib.import_module(f"experiments.{name}")
    if hasattr(module, "__path__"):
      module = importlib.import_module(f"experiments.{name}.__main__")
    assert {*module.FLAGS} >= {*re.findall(r"--(\w+)", arguments)}, f"{name}{arguments}"
    assert all((ROOT / file).exists() for file in re.findall(r"configs/\w+\.py", arguments))


@pytest.mark.parametrize(
  "page, name",
  dict(operator="relpos_jax", nn="relpos_jax.nn", linen="relpos_jax.linen").items(),
)
def test_a_page_of_the_api_lists_all_public_names(page, name):
  text = (ROOT / f"docs/api/{page}.md").read_text("utf-8")
  members = text[text.index("members:") :]
  assert {*re.findall(r"\w+", members)} - {"members"} == {*importlib.import_module(name).__all__}


def test_some_pages_have_examples_and_commands():
  assert len(EXAMPLES) >= 5 and {"README", "train"} <= {*EXAMPLES} & {*COMMANDS}
