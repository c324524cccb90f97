"""Every config is valid, and the configs of the paper have the paper's numbers."""

import collections
import functools
import importlib
import inspect
import json
import pathlib
import re
import shlex
import textwrap
from unittest import mock

import jax
import numpy as np
import pytest
from faults import refusal
from flax import nnx

from configs import default
from experiments import command
from experiments import sweep as cells_module
from experiments.config import flatten
from experiments.data.batching import Schedule
from experiments.errors import InputError
from experiments.evaluation.records import digest, read_records, record_files
from experiments.systems import load_config, parse_config
from experiments.training.batches import configure_batches, longest_shape
from experiments.training.sharding import batch_multiples, make_mesh
from experiments.training.step import learning_rate
from experiments.translation.corpus import parse_test_files
from experiments.translation.data import learn_tokenizer, load_data
from experiments.translation.train import make_model, mock_vocabulary

pytestmark = pytest.mark.usefixtures("in_the_repository")

ONE = make_mesh(data=1)
VOCABULARY = 32_768  # "about", says the paper
ENTRIES = 9712  # size of Multi30k's published vocabulary


def load(name: str, *changes: str):
  """Returns a config, FILE.py[:ARGUMENT], with changes, as the commands parse it."""
  flags = [f"--config.{change}" for change in changes]
  return parse(command.CONFIG, f"--config=configs/{name}", *flags)


def parse(kind, *words: str):
  return command.parse({"config": kind}, words)["config"]


def num_parameters(config, vocabulary=VOCABULARY) -> int:
  config.vocabulary.size = vocabulary
  entries = mock_vocabulary(config)
  model = nnx.eval_shape(lambda: make_model(config, entries, nnx.Rngs(0)))
  shapes = nnx.state(model, nnx.Param)
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


SWEEPS = ("table1", "table2", "table3", "sharing", "beyond")
BRIEF = [f"{name}.py" for name in SWEEPS]
VALID = """
default.py quickstart.py multi30k.py wmt14.py music.py music.py:published,clipped
music.py:none multi30k.py:brief multi30k.py:short multi30k.py:published
multi30k.py:both multi30k.py:none multi30k.py:sinusoidal,published,prepared
wmt14.py:big,enfr,sinusoidal,v2 lengths.py:embedded lengths.py
graph.py graph.py:tu graph.py:mutagenicity
length_tasks.py length_tasks.py:stack_manipulation,xl,random
"""


@pytest.mark.parametrize("name", VALID.split())
def test_every_config_is_valid(name):
  parse_config(load(name))


@pytest.mark.parametrize("size, width", [("base", 512), ("big", 1024)])
def test_the_two_recipes_of_the_time(size, width):
  # Tensor2tensor of September 2017 and from October 2017 on.
  v1, v2 = load(f"wmt14.py:{size},v1"), load(f"wmt14.py:{size},v2")
  assert (v1.model.norm, v2.model.norm) == ("post", "pre")
  rates = [x.model.attention_dropout_rate for x in (v1, v2)]
  assert rates == [0.0, 0.1]
  for config, rate, warmup in ((v1, 1, 4000), (v2, 2, 8000)):
    rates = learning_rate(config.training, width)
    for update in (1, 1000, 4000, 8000, 100_000):
      wanted = rate * width**-0.5 * min(update**-0.5, update * warmup**-1.5)
      np.testing.assert_allclose(rates(update - 1), wanted, rtol=1e-6)


@pytest.mark.parametrize("size, extra", [("base", 405_504), ("big", 26_112)])
def test_parameters_are_those_of_the_paper(size, extra):
  # Four projections of attention, biases in feed-forwards alone, norms of two vectors.
  relative, sinusoidal = load(f"wmt14.py:{size}"), load(f"wmt14.py:{size},sinusoidal")
  width, hidden = sinusoidal.model.width, sinusoidal.model.feed_forward
  attention, norm = 4 * width**2, 2 * width
  feed_forward = 2 * width * hidden + hidden + width
  layers = 3 * attention + 2 * feed_forward + 5 * norm  # an encoder's and a decoder's
  total = VOCABULARY * width + 6 * layers
  assert num_parameters(sinusoidal) == total
  assert num_parameters(relative) == total + extra
  if size == "base":
    assert num_parameters(load("wmt14.py:v2")) == total + extra + 2 * norm


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
  "sizes", [dict(data=4, fsdp=2), dict(data=2, sequence=4), dict(data=1, sequence=8)]
)
def test_the_examples_of_a_step_do_not_depend_on_the_mesh(sizes, ring):
  lengths = np.random.default_rng(0).integers(1, 40, 2000)
  config, mesh = load("quickstart.py"), make_mesh(**sizes)
  config.batches.update(max_length=35, num_shapes=4)
  config.mesh.ring = ring
  both = [configure_batches(config, lengths, x, kind=Schedule) for x in (ONE, mesh)]
  alone, sharded = (make(lengths, seed=0) for make in both)
  assert (sharded.num_per_epoch, sharded.dropped) == (
    alone.num_per_epoch,
    alone.dropped,
  )
  for step in range(2 * alone.num_per_epoch):
    np.testing.assert_array_equal(sharded.order(step), alone.order(step))
  num_rows, num_tokens = batch_multiples(mesh.shape, ring)
  for rows, length in sharded.shapes:
    assert rows % num_rows == length % num_tokens == 0
  assert sharded.shapes[-1] == longest_shape(config, mesh.shape)


@pytest.mark.parametrize(
  "config, words",
  [
    ([], "config.json is no JSON object"),
    ({"task": ["a"]}, "config.task is ['a']: choose one of translation, "),
    ({"model": None}, "config.model is None: give a value, as in configs/"),
    ({"decoding": 3}, "config: Could not override field 'decoding'"),
    ({"model": {"width": None}}, "config.model.width is None: give a value, as in "),
  ],
)
def test_a_config_of_another_form_is_refused(config, words, tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(config))
  assert words in refusal(load_config, tmp_path)


@pytest.mark.parametrize("argument", ["brief,published", "relative,none", "mine"])
def test_wrong_arguments_are_refused(argument):
  with pytest.raises(InputError, match=r"unknown|exclude"):
    load(f"music.py:{argument}")


def plan(name: str) -> list[cells_module.PlannedRun]:
  """Returns a sweep's cells with seed 0, without checking their configs."""
  file = parse(command.SWEEP, f"--config=configs/{name}")
  with mock.patch("experiments.systems.parse_config"):
    return cells_module.plan_runs(file, 1, pathlib.Path("runs"))


# Two sources of a task, such as graph.py:mutagenicity, have the same rows.
OTHERS = ["lengths.py:scan", "table1.py:published", "music.py"]
OTHERS += ["graph.py:clutrr", "graph.py:tu", "length_tasks.py"]


def differing_keys(config, base) -> set[str]:
  values = flatten(base)
  return {key for key, value in flatten(config).items() if value != values[key]}


@pytest.mark.parametrize("name", [*BRIEF, *OTHERS])
def test_every_sweep_has_a_base_cell_and_equal_budgets(name):
  # Rows are valid and change the model alone; Multi30k's sweeps have one base cell.
  base = load(name)
  for cell in plan(name):
    config = parse(command.CONFIG, *cell.command[3:-1])
    parse_config(config, num_devices=1)
    assert all(key.startswith("model.") for key in differing_keys(config, base))
  if name in BRIEF:
    assert differing_keys(base, load("multi30k.py:brief")) == {"name"}


def test_multi30k_has_the_published_number_of_parameters():
  # The baseline has biases in four projections of each of three attentions a layer.
  biases = 4 * (1 + 2) * 4 * 128
  assert num_parameters(load("multi30k.py:sinusoidal"), ENTRIES) + biases == 2_568_192


def test_the_prepared_text_gives_the_published_vocabulary(shared_data):
  folder = shared_data / "multi30k" / "bpe10k_en-de"
  path = f"data.multi30k.path={folder}"
  config = load("multi30k.py:sinusoidal,published,prepared", path)
  tokenizer = learn_tokenizer(config, load_data(config))
  assert tokenizer.get_vocab_size() == ENTRIES == 8 * 1214


def test_the_documented_config_of_ones_own_works_anywhere(tmp_path):
  doc = inspect.cleandoc(default.__doc__)
  code = doc[doc.index("from configs import default") :]
  file = tmp_path / "mine.py"
  file.write_text(textwrap.dedent(f"  {code}"))
  config = parse(command.CONFIG, f"--config={file}")
  parse_config(config)
  assert (config.name, config.data.source) == ("mine", "pairs")
  assert config.data.pairs.valid == "valid.en,valid.de"


@pytest.mark.parametrize(
  "text, files",
  [
    ("", {}),
    ("a.tsv", {"test": "a.tsv"}),
    ("long=b.tsv", {"long": "b.tsv"}),
    ("a.tsv;long=b.en,b.de", {"test": "a.tsv", "long": "b.en,b.de"}),
    ("sets/of=2/a.tsv", {"test": "sets/of=2/a.tsv"}),
  ],
)
def test_test_sets_have_names(text, files):
  assert parse_test_files(text) == files


def test_a_run_with_test_sets_by_name_is_read(tmp_path):
  config = default.get_config().to_dict()
  files = {"test": "a.tsv", "long": "b.en,b.de"}
  config["data"]["source"] = "pairs"
  config["data"]["pairs"]["test"] = files
  (tmp_path / "config.json").write_text(json.dumps(config))
  assert parse_test_files(load_config(tmp_path).data.pairs.test) == files


@pytest.mark.parametrize(
  "name",
  [
    "train",
    "evaluate",
    "translate",
    "report",
    "sweep",
    "ten_minutes",
    "plan",
    "export",
  ],
)
def test_the_examples_of_help_parse(call, name):
  answer = call(name, "--help")
  assert (answer.status, answer.err, answer.compiled) == (0, "", [])
  assert all(len(line) <= 110 for line in answer.out.splitlines())
  pattern = rf"python -m experiments\.{name} ([^\n>|]*)"
  examples = re.findall(pattern, answer.out.replace("\\\n", ""))
  flags = importlib.import_module(f"experiments.{name}").FLAGS
  assert examples
  for example in examples:
    assert command.parse(flags, shlex.split(example))


RESULTS = pathlib.Path(__file__).parents[2] / "results" / "runs"


def read_pages(paths) -> str:
  return "".join(path.read_text("utf-8") for path in paths)


@functools.cache
def documented_sweeps() -> set[str]:
  """Returns the names of the results of documented sweeps."""
  text = read_pages(pathlib.Path("configs").glob("*.py"))
  text += pathlib.Path("experiments/sweep.py").read_text()
  files = re.findall(r"experiments\.sweep --config=configs/([\w.:,]*\w)", text)
  return {cells_module.slug(load(file).name) for file in files}


def section(name: str) -> tuple[list[dict], str]:
  """Returns the flags of the commands above the table of a sweep, and its minutes."""
  pages = read_pages(RESULTS.parent.glob("*.md"))
  pattern = rf"```\n([^`]*)\n```\n\n<!-- begin {name} -->\n.*, ([\d,]+) minutes"
  commands, minutes = re.search(pattern, pages).groups()
  flags = []
  for line in commands.splitlines():
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "experiments.sweep"]
    flags.append(command.parse(cells_module.FLAGS, words[3:]))
  return flags, minutes


@pytest.mark.parametrize("name, file", sorted(record_files(RESULTS).items()))
def test_a_documented_sweep_finds_its_committed_records(name, file):
  """Compares configs: a sweep trains again what has a record of an older recipe."""
  lines = read_records(file)
  flags, minutes = section(name)
  assert minutes == f"{sum(line['budget']['minutes'] for line in lines):,.0f}"
  assert name in documented_sweeps()

  seeds = {line["seed"] for line in lines}
  runs = collections.Counter(line["row"] for line in lines)
  documented = {}
  for values in flags:
    assert values["results"].name == "mine"
    rows = [row for row, _ in values["config"].module.sweep()]
    for row in [values["only"]] if values["only"] else rows:
      documented[row] = values["seeds"]
  assert documented.keys() == runs.keys()
  for row, number in documented.items():
    assert number in (runs[row], len(seeds))

  config = flags[0]["config"].name.removeprefix("configs/")
  cells = {cell.configuration: cell.digest for cell in plan(config)}
  for line in lines:
    assert line["seed"] < documented[line["row"]]
    values = dict(line["config"])
    assert values.pop("seed", 0) == line["seed"]
    assert cells[line["row"]] == digest(values)
    assert line["digest"] == digest(line["config"], line.get("recipe", 1))
