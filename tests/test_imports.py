"""Tests that imports point one way: systems import the library, and never one another.

`experiments` may import everything; nothing but tests imports them.
"""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

FOUNDATION = {"relpos_jax.typing", "relpos_jax.errors"}
ATTENTION = FOUNDATION | {"relpos_jax.attention"}
NN = ATTENTION | {"relpos_jax.nn"}
MODELS = NN | {"relpos_jax.models"}
DATA = FOUNDATION | {"relpos_jax.files", "relpos_jax.config", "relpos_jax.data"}
LIBRARY = MODELS | DATA | {f"relpos_jax.{name}" for name in ("training", "decoding", "evaluation")}
SYSTEMS = {"relpos_jax.translation", "relpos_jax.music", "relpos_jax.graphs"}
# The packages of this project that each package may import besides itself.
MAY_IMPORT = {
  "relpos_jax.typing": set(),
  "relpos_jax.errors": set(),
  "relpos_jax.files": FOUNDATION,
  "relpos_jax.config": FOUNDATION,
  "relpos_jax.attention": FOUNDATION,
  "relpos_jax.nn": ATTENTION,
  "relpos_jax.linen": NN,
  "relpos_jax.models": NN,
  "relpos_jax.decoding": MODELS,
  "relpos_jax.data": DATA,
  "relpos_jax.training": DATA | {"relpos_jax.nn"},
  "relpos_jax.evaluation": DATA,
  **dict.fromkeys(sorted(SYSTEMS), LIBRARY),
  "relpos_jax": {"relpos_jax.attention"},  # the public names, nothing else
  "configs": set(),
}
# The third-party libraries that the pure packages may import.
OUTSIDE = {
  "relpos_jax.typing": {"jax", "jaxtyping"},
  "relpos_jax.errors": set(),
  "relpos_jax.files": {"etils", "fsspec"},
  "relpos_jax.attention": {"jax", "numpy"},
  "relpos_jax.nn": {"jax", "flax"},
  "relpos_jax.linen": {"jax", "flax"},
  "relpos_jax.models": {"jax", "flax"},
  "configs": {"ml_collections"},
}
# Third-party libraries that only these modules may import.
BEHIND = {
  "orbax": {"relpos_jax.training.checkpoint", "relpos_jax.training.checkpoint_reader"},
  "fsspec": {"relpos_jax.files"},
  "tensorboardX": {"relpos_jax.training.metrics"},
  "tokenizers": {"relpos_jax.data.tokenizer"},
  "grain": {"relpos_jax.data.batching"},
  "sacrebleu": {"relpos_jax.evaluation.bleu"},
  "mido": {"relpos_jax.music.midi_files"},
  "matplotlib": {"relpos_jax.evaluation.pictures"},
}
# The packages that need the base install only, and the libraries that they may not import, not even
# through others.
BASE = {f"relpos_jax.{name}" for name in ("attention", "nn", "linen", "models", "decoding")}
EXPERIMENTS = {"ml_collections", "tensorflow_datasets", "tokenizers", "sacrebleu", "grain", "mido"}
EXPERIMENTS |= {"matplotlib", "scipy", "tensorboardX", "sacremoses", "requests", "array_record"}
EXPERIMENTS |= {"fsspec"}


def modules() -> dict[str, pathlib.Path]:
  paths = [path for folder in ("relpos_jax", "configs") for path in (ROOT / folder).rglob("*.py")]
  return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(paths)}


MODULES = modules()


def imports(path: pathlib.Path) -> set[str]:
  """Returns every module that a file imports, also inside its functions."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, f"{path}: imports are absolute"
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
  return names


def package(name: str) -> str:
  """Returns two parts of a module's name in relpos_jax, otherwise one: relpos_jax.nn, configs."""
  parts = name.split(".")
  is_ours = parts[0] == "relpos_jax" and len(parts) > 1 and parts[1] != "__init__"
  return ".".join(parts[:2]) if is_ours else parts[0]


PROJECT = {"relpos_jax", "configs", "experiments", "tests"}
IMPORTS = {name: imports(path) for name, path in MODULES.items()}


@pytest.mark.parametrize("own", MAY_IMPORT)
def test_imports_point_one_way(own):
  wrong = {
    (name, imported)
    for name in MODULES
    if package(name) == own
    for imported in IMPORTS[name]
    if imported.split(".")[0] in PROJECT and package(imported) not in MAY_IMPORT[own] | {own}
  }
  assert not wrong


def test_every_package_is_listed_and_the_library_imports_no_system():
  assert {package(name) for name in MODULES} == {*MAY_IMPORT}
  assert not SYSTEMS & LIBRARY and not SYSTEMS & set().union(*MAY_IMPORT.values())


@pytest.mark.parametrize("own", OUTSIDE)
def test_the_pure_packages_need_few_libraries(own):
  modules = [name for name in MODULES if package(name) == own]
  tops = {imported.split(".")[0] for name in modules for imported in IMPORTS[name]}
  assert modules and tops - PROJECT - sys.stdlib_module_names <= OUTSIDE[own]


@pytest.mark.parametrize("library, modules", BEHIND.items())
def test_only_these_modules_import_a_library(library, modules):
  tops = {name: {imported.split(".")[0] for imported in IMPORTS[name]} for name in MODULES}
  assert {name for name in MODULES if library in tops[name]} == modules


def test_the_operator_loads_no_kernels_before_they_are_used():
  program = """
import jax, sys, relpos_jax
x = jax.numpy.ones((1, 4, 1, 8))
relpos_jax.dot_product_attention(x, x, x, relations=relpos_jax.RelativePositions(x[0, :3, 0], None))
print([name for name in sys.modules if name.startswith("jax.experimental.pallas")])
"""
  answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
  assert (answer.stdout, answer.returncode) == ("[]\n", 0), answer.stderr


def test_the_library_needs_the_base_install_only():
  """Refuses the libraries of the extra `experiments` in an import hook."""
  program = f"""
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
  def find_spec(self, name, path=None, target=None):
    if name.partition(".")[0] in {sorted(EXPERIMENTS)}:
      raise ModuleNotFoundError(f"{{name}} is not in the base install")
sys.meta_path.insert(0, Refuse())
import relpos_jax, relpos_jax.linen, relpos_jax.nn
{"".join(f"import {name}{chr(10)}" for name in MODULES if package(name) in BASE)}
"""
  answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
  assert answer.returncode == 0, answer.stderr
