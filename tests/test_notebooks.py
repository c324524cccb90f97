"""Notebooks install alike and are stored with clean outputs; nbmake runs them."""

import configparser
import importlib.util
import json
import pathlib
import re
import runpy
import sys

import pytest

PATHS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
SHOWS = re.compile(r"(?m)^(print|plt\.show|display|Image|Markdown|HTML|Audio)\(")
MACHINE = re.compile(r"/(work|tmp|root|home|Users|content|usr|var)/|site-packages")


def code_cells(path):
  cells = json.loads(path.read_text("utf-8"))["cells"]
  return [cell for cell in cells if cell["cell_type"] == "code"]


def source(cell):
  return "".join(cell["source"])


def texts(output):
  """Yields what an output says: base64 would hold any word."""
  yield "".join(output.get("text", ""))
  for kind, data in output.get("data", {}).items():
    if kind.startswith("text/"):
      yield re.sub(r"data:\w+/\w+;base64,[\w+/=]+", "", "".join(data))


def extras(text) -> str:
  return re.search(r"checkout\[([\w,]+)\]", text)[1]


each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


@each_notebook
def test_the_badge_and_the_install_cell_have_the_address_of_setup_cfg(path):
  heads = runpy.run_path(str(path.parents[1] / ".ci/notebooks.py"))
  with_head = heads["with_head"]
  assert with_head(path, heads["public_address"]()) == path.read_text("utf-8")
  elsewhere = with_head(path, "https://github.com/here/it")
  assert f"/github/here/it/blob/main/notebooks/{path.name})" in elsewhere
  assert elsewhere.count("here/it") == 2
  assert "OWNER" not in elsewhere


@each_notebook
def test_the_first_cell_installs_what_the_others_import(path):
  setup = configparser.ConfigParser()
  setup.read(path.parents[1] / "setup.cfg")
  text = "\n".join(map(source, code_cells(path)))
  required = setup["options"]["install_requires"]
  for extra in extras(text).split(","):
    required += setup["options.extras_require"][extra]
  installed = re.findall(r"^[\w-]+", required, re.MULTILINE)
  known = {name.replace("-", "_") for name in installed} | sys.stdlib_module_names
  imported = {*re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE)}
  assert imported <= known | {"relpos_jax", "experiments", "configs", "IPython"}


@each_notebook
def test_the_first_cell_names_the_extras_that_are_missing(path, monkeypatch):
  text = source(code_cells(path)[0])
  python = re.sub(r"^  [!%].*", "  raise AssertionError", text, flags=re.MULTILINE)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "relpos_jax")
  remedy = re.escape(f"pip install -e '.[{extras(text)}]'")
  with pytest.raises(ImportError, match=remedy):
    exec(python, {})
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
  exec(python, {})


@pytest.mark.parametrize("name, data", [("music", "chorales"), ("graphs", "clutrr")])
def test_the_first_cell_below_names_a_folder_for_what_is_downloaded(name, data):
  (path,) = [path for path in PATHS if path.stem == name]
  _, imports, *others = map(source, code_cells(path))
  assert re.search(r'^FOLDER = os\.environ\.get\("\w+", ""\)', imports, re.MULTILINE)
  assert f"config.data.{data}.path = FOLDER\n" in "".join(others)


@each_notebook
def test_outputs_are_stored_and_name_neither_errors_nor_the_machine(path):
  outputs = []
  for cell in code_cells(path):
    assert cell["outputs"] or not SHOWS.search(source(cell))
    outputs += cell["outputs"]
  assert any("image/png" in output.get("data", {}) for output in outputs)
  for output in outputs:
    assert output["output_type"] != "error"
    assert output.get("name") != "stderr"
    assert not [text for text in texts(output) if MACHINE.search(text)]
