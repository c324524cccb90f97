"""Imports point one way: a house of layers, none of which knows what stands on it."""

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
# The modules of this project that each package may import besides itself: systems import the
# library and not one another, and the library knows no system.
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
  "relpos_jax.translation": LIBRARY,
  "relpos_jax.music": LIBRARY,
  "relpos_jax.graphs": LIBRARY,
  "relpos_jax": {"relpos_jax.attention"},  # the public names, nothing else
  "configs": set(),
}
# The pure packages need nothing but these from outside.
OUTSIDE = {
  "relpos_jax.typing": {"jax", "jaxtyping"},
  "relpos_jax.errors": set(),
  "relpos_jax.files": set(),
  "relpos_jax.attention": {"jax", "numpy"},
  "relpos_jax.nn": {"jax", "flax"},
  "relpos_jax.linen": {"jax", "flax"},
  "relpos_jax.models": {"jax", "flax"},
  "configs": {"ml_collections"},
}
# Each third-party library that is kept behind a module or two.
BEHIND = {
  "orbax": {"relpos_jax.training.checkpoint", "relpos_jax.training.checkpoint_reader"},
  "tensorboardX": {"relpos_jax.training.metrics"},
  "tokenizers": {"relpos_jax.data.tokenizer"},
  "grain": {"relpos_jax.data.batching"},
  "sacrebleu": {"relpos_jax.evaluation.bleu"},
  "mido": {"relpos_jax.music.midi_files"},
  "matplotlib": {"relpos_jax.evaluation.pictures"},
}


# The packages that stand on jax, flax, numpy and jaxtyping alone, and libraries that they may not
# import, not even through others.
BASE = {f"relpos_jax.{name}" for name in ("attention", "nn", "linen", "models", "decoding")}
EXPERIMENTS = {"ml_collections", "tensorflow_datasets", "tokenizers", "sacrebleu", "grain", "mido"}
EXPERIMENTS |= {"matplotlib", "scipy", "tensorboardX", "sacremoses", "requests", "array_record"}


def modules() -> dict[str, pathlib.Path]:
  paths = [path for folder in ("relpos_jax", "configs") for path in (ROOT / folder).rglob("*.py")]
  return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(paths)}


MODULES = modules()


def imports(path: pathlib.Path) -> set[str]:
  """Every module that a file imports, wherever in it."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, f"{path}: imports are absolute"
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
  return names


def package(name: str) -> str:
  """Two parts of a name of relpos_jax, one of others: relpos_jax.nn, configs, numpy."""
  parts = name.split(".")
  is_ours = parts[0] == "relpos_jax" and len(parts) > 1 and parts[1] != "__init__"
  return ".".join(parts[:2]) if is_ours else parts[0]


def test_every_package_is_known():
  assert {package(name) for name in MODULES} == set(MAY_IMPORT)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name):
  own = package(name)
  ours = {package(n) for n in imports(MODULES[name]) if n.split(".")[0] in _PROJECT} - {own}
  assert ours <= MAY_IMPORT[own], f"{name} imports {ours - MAY_IMPORT[own]}"


_PROJECT = {"relpos_jax", "configs", "experiments", "tests"}


@pytest.mark.parametrize("name", [name for name in MODULES if package(name) in OUTSIDE])
def test_the_pure_packages_need_little(name):
  tops = {n.split(".")[0] for n in imports(MODULES[name])}
  outside = tops - _PROJECT - sys.stdlib_module_names
  assert outside <= OUTSIDE[package(name)], f"{name} imports {outside}"


@pytest.mark.parametrize("library, modules", BEHIND.items())
def test_each_of_these_libraries_is_known_to_its_modules_alone(library, modules):
  users = {
    name
    for name, path in MODULES.items()
    if any(imported.split(".")[0] == library for imported in imports(path))
  }
  assert users == modules


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
  """As without the extra `experiments`: an import hook refuses all that the base does not need."""
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
