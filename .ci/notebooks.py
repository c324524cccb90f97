"""Writes the badge and the install cell of every notebook, with the address in
setup.cfg.

python .ci/notebooks.py
"""

import configparser
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What each extra installs that is seldom there without it.
PACKAGES = {"experiments": ["ml_collections"], "published": ["torch", "transformers"]}
EXTRAS = {"published.ipynb": ["experiments", "published"]}
INSTALL = """\
# Installs relpos_jax where it is not installed, such as in Colab.
import importlib.util
import sys

packages = [{packages}]
if not importlib.util.find_spec("relpos_jax"):
  !git clone --quiet --depth=1 {address} checkout
  %pip install --quiet -e "./checkout[{extras}]"
  sys.path.insert(0, "checkout")
elif not all(map(importlib.util.find_spec, packages)):
  raise ImportError("run this in the clone: pip install -e '.[{extras}]'")"""


def public_address() -> str:
  """Returns the address of the repository."""
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  return setup["metadata"]["url"]


def with_head(path: pathlib.Path, address: str) -> str:
  """Returns a notebook's text with the badge below its title and the install cell."""
  notebook = json.loads(path.read_text("utf-8"))
  title, install, *_ = notebook["cells"]
  page = address.removeprefix("https://") + f"/blob/main/notebooks/{path.name}"
  colab = "https://colab.research.google.com"
  badge = f"[![Open in Colab]({colab}/assets/colab-badge.svg)]({colab}/{page})\n"
  title["source"][2] = badge.replace("/github.com/", "/github/")
  extras = EXTRAS.get(path.name, ["experiments"])
  packages = [f'"{package}"' for extra in extras for package in PACKAGES[extra]]
  cell = INSTALL.format(
    address=address, extras=",".join(extras), packages=", ".join(packages)
  )
  install["source"] = cell.splitlines(keepends=True)
  return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
  for path in PATHS:
    path.write_text(with_head(path, public_address()), "utf-8")
