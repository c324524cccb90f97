"""Tests of the wall: the library needs four packages and never imports what is run.

Inside the library and inside `experiments`, imports point one way.
"""

import ast
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# Layers of the packages of this project, and below what each may import besides itself.
NN = {"relpos_jax.typing", "relpos_jax.attention", "relpos_jax.nn"}
MODELS = {"relpos_jax.models", "relpos_jax.decoding"}
FOUNDATION = {"relpos_jax.typing", "experiments.errors", "experiments.files"}
FOUNDATION |= {"experiments.config", "experiments.signals"}
SHARED = {"experiments.data", "experiments.training", "experiments.evaluation"}
SYSTEMS = {"experiments.translation", "experiments.music", "experiments.graphs"}
SYSTEMS |= {"experiments.length_tasks"}
MAY_IMPORT = {
  "relpos_jax.typing": set(),
  "relpos_jax.attention": {"relpos_jax.typing"},
  "relpos_jax": {"relpos_jax.attention"},  # the public names, nothing else
  "relpos_jax.nn": {"relpos_jax.typing", "relpos_jax.attention"},
  "relpos_jax.linen": NN,
  "relpos_jax.models": NN,
  "relpos_jax.decoding": {"relpos_jax.typing"},
  "configs": set(),
  "experiments.errors": set(),
  "experiments.signals": set(),
  "experiments.files": {"experiments.errors"},
  "experiments.config": {"configs", "experiments.errors"},
  "experiments.data": FOUNDATION,
  "experiments.evaluation": FOUNDATION | {"experiments.data"},
  "experiments.training": FOUNDATION | NN | SHARED,
}
for system in sorted(SYSTEMS):
  MAY_IMPORT[system] = FOUNDATION | NN | SHARED | MODELS
OF_COMMANDS = {f"experiments.{name}" for name in ("benchmark", "launch")}
LIBRARY = {name for name in MAY_IMPORT if name.startswith("relpos_jax")}


def package(name: str) -> str:
  """Returns a module's package: relpos_jax.nn, experiments.data, configs."""
  parts = name.split(".")
  is_ours = parts[0] in ("relpos_jax", "experiments") and parts[1:2] != ["__init__"]
  return ".".join(parts[:2]) if is_ours else parts[0]


def modules() -> dict[str, pathlib.Path]:
  paths = [*ROOT.glob("relpos_jax/**/*.py"), *ROOT.glob("configs/**/*.py")]
  paths += ROOT.glob("experiments/*/*.py")
  for name in FOUNDATION - LIBRARY:
    paths.append(ROOT / f"{name.replace('.', '/')}.py")
  named = {}
  for path in sorted(paths):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    if package(name) not in OF_COMMANDS:
      named[name] = path
  return named


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


PROJECT = {"relpos_jax", "configs", "experiments", "tests"}
IMPORTS = {name: imports(path) for name, path in MODULES.items()}


def modules_of(own: str) -> list[str]:
  return [name for name in MODULES if package(name) == own]


@pytest.mark.parametrize("own", MAY_IMPORT)
def test_imports_point_one_way(own):
  for name in modules_of(own):
    ours = {x for x in IMPORTS[name] if x.split(".")[0] in PROJECT}
    assert {*map(package, ours)} <= MAY_IMPORT[own] | {own}, name


def test_every_package_is_listed_and_the_library_imports_nothing_that_is_run():
  assert {package(name) for name in MODULES} == {*MAY_IMPORT}
  assert set().union(*(MAY_IMPORT[name] for name in LIBRARY)) < LIBRARY


def test_the_library_needs_four_packages():
  imported = {x for own in LIBRARY for name in modules_of(own) for x in IMPORTS[name]}
  packages = {name.split(".")[0] for name in imported} - PROJECT
  others = packages - sys.stdlib_module_names
  assert others == {"jax", "flax", "numpy", "jaxtyping"}


def run_python(*arguments):
  """Runs Python in a process of its own, in the root of the project."""
  words = sys.executable, *arguments
  return subprocess.run(words, capture_output=True, text=True, cwd=ROOT)


# What is seen outside of tests, whose checks of types change signatures and the stack.
FACTS = """
import inspect, json, sys, typing, warnings
import jax.numpy as jnp
from relpos_jax import LinearBias, RelativePositions, dot_product_attention
x = jnp.ones((1, 4, 1, 8))
relations = RelativePositions(x[0, :3, 0], None)
dot_product_attention(x, x, x, relations=relations)
kernels = [name for name in sys.modules if name.startswith("jax.experimental.pallas")]

from relpos_jax.attention.inputs import AttentionOptions
from relpos_jax.nn import RelativePositionTables
from relpos_jax.nn.positions import TableOptions
signature = inspect.signature(dot_product_attention)
overloads = typing.get_overloads(dot_product_attention)
names = inspect.signature(RelativePositionTables.__init__).parameters.keys()

with warnings.catch_warnings(record=True) as caught:
  warnings.simplefilter("always")
  dot_product_attention(x[:, :1], x, x, relations=LinearBias.alibi(1), is_causal=True)
facts = {
  "kernels": kernels,
  "signature": str(signature),
  "results": [overload.__annotations__["return"] for overload in overloads],
  "own": sorted(signature.parameters.keys() - AttentionOptions.__annotations__.keys()),
  "of tables": sorted(names - TableOptions.__annotations__.keys()),
  "warnings": [(x.filename, x.lineno, str(x.message)) for x in caught],
}
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts():
  answer = run_python("-c", FACTS)
  assert answer.returncode == 0, answer.stderr
  return json.loads(answer.stdout)


def test_the_operator_loads_no_kernels_before_they_are_used(facts):
  assert facts["kernels"] == []


def test_a_warning_names_the_line_that_calls(facts):
  ((filename, line, message),) = facts["warnings"]
  assert "query_offset=" in message
  assert filename == "<string>"
  assert "LinearBias.alibi(1), is_causal=True" in FACTS.splitlines()[line - 1]


# Libraries, and systems of the project, that take long to load.
HEAVY = {
  "grain",
  "matplotlib",
  "orbax",
  "sacrebleu",
  "sacremoses",
  "scipy",
  "tensorboardX",
}
HEAVY |= {"tensorflow_datasets"}


COMMANDS = ["train", "evaluate", "translate", "sample", "launch", "sweep", "export"]
COMMANDS += ["plan", "report", "benchmark", "benchmark attention", "ten_minutes"]
WRONG_COMMANDS = f"""
import runpy, sys
for command in {COMMANDS}:
  name, *words = command.split()
  sys.argv[1:] = [*words, "--wrong=1"]
  try:
    runpy.run_module(f"experiments.{{name}}", run_name="__main__", alter_sys=True)
  except SystemExit as end:
    print(command, end.code)
  for heavy in sorted({HEAVY | {"jax", "flax"}} & sys.modules.keys()):
    print("loads", heavy)
"""


def test_commands_tell_a_wrong_key_before_they_load_jax():
  answer = run_python("-c", WRONG_COMMANDS)
  wanted = [f"{command} 2" for command in COMMANDS]
  assert answer.stdout.splitlines() == wanted, answer.stderr[-1000:]


def test_editors_see_short_signatures_one_result_and_all_options(facts):
  assert len(facts["signature"]) < 1000
  assert "relations: 'Relations | None' = None" in facts["signature"]
  assert facts["results"] == ["Array", "tuple[Array, Array]"]
  own = ["bias", "implementation", "key", "mask", "query", "return_residual", "value"]
  assert facts["own"] == own
  assert facts["of tables"] == ["head_width", "max_distance", "rngs", "self"]
