"""Tests that every config is valid and that those of the paper have the paper's numbers."""

import importlib
import inspect
import itertools
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
from experiments.config import changes
from experiments.data.batching import Schedule
from experiments.errors import InputError
from experiments.evaluation.records import digest, read_records, record_files
from experiments.systems import load_config, parse_config
from experiments.training.batches import configure_batches, longest_shape
from experiments.training.sharding import make_mesh, multiples
from experiments.training.step import learning_rate
from experiments.translation.data import learn_tokenizer, load_data, parse_test_files
from experiments.translation.train import make_model, mock_vocabulary

pytestmark = pytest.mark.usefixtures("in_the_repository")

VOCABULARY = 32_768  # "about", says the paper
LONGEST_CHORALE = 2065  # tokens of the longest training piece, with its end
ENTRIES = 9712  # size of Multi30k's published vocabulary


def load(name: str, *changes: str):
  """Returns a config by FILE.py[:ARGUMENT] and its changes, as the commands parse it."""
  arguments = [
    f"--config=configs/{name}",
    *(f"--config.{change}" for change in changes),
  ]
  return command.parse(dict(config=command.CONFIG), arguments)["config"]


def num_parameters(config, vocabulary=VOCABULARY) -> int:
  config.vocabulary.size = vocabulary
  make = lambda: make_model(config, mock_vocabulary(config), nnx.Rngs(0))
  shapes = nnx.state(nnx.eval_shape(make), nnx.Param)
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def rates(config, *updates: int) -> list[float]:
  """Returns the learning rates of updates, numbered from 1."""
  return [float(learning_rate(config)(update - 1)) for update in updates]


POSITIONS = ("relative", "sinusoidal", "both", "none")
RECIPES = ("brief", "short", "published")
MULTI30K = [",".join(words) for words in itertools.product(POSITIONS, RECIPES)]
KINDS = ("relative", "clipped", "sinusoidal", "none")
MUSIC = [",".join(words) for words in itertools.product(KINDS, ("brief", "published"))]
ARGUMENTS = {"music.py": MUSIC, "multi30k.py": MULTI30K}
SWEEPS = ("table1", "table2", "table3", "sharing", "beyond")
SWEEP_FILES = [
  f"{name}.py{argument}" for name in SWEEPS for argument in ("", ":published")
]
SWEEP_FILES = [*SWEEP_FILES, "lengths.py:embedded", "lengths.py:scan"]


@pytest.mark.parametrize(
  "name",
  [
    *("default.py", "quickstart.py", "multi30k.py", "wmt14.py"),
    *("music.py", "music.py:published,clipped", "music.py:none"),
    *(f"multi30k.py:{argument}" for argument in (*RECIPES, "both", "none")),
    "multi30k.py:sinusoidal,published,prepared",
    *("wmt14.py:big,enfr,sinusoidal,v2", "lengths.py:embedded", "lengths.py"),
    *("graph.py", "graph.py:tu", "graph.py:mutagenicity"),
  ],
)
def test_every_config_is_valid(name):
  parse_config(load(name))


def test_no_two_experiments_share_a_folder():
  wmt14 = itertools.product(
    ("base", "big"), ("ende", "enfr"), POSITIONS[:2], ("v1", "v2")
  )
  files = [f"wmt14.py:{','.join(words)}" for words in wmt14]
  files += [f"{file}:{x}" for file, of in ARGUMENTS.items() for x in of]
  names = [
    load(name).name for name in (*files, *SWEEP_FILES, "default.py", "quickstart.py")
  ]
  assert len({*names}) == len(names)


@pytest.mark.parametrize("size", ["base", "big"])
def test_the_two_recipes_of_the_time(size):
  # Tensor2tensor of September 2017 and from October 2017 on.
  v1, v2 = load(f"wmt14.py:{size},v1"), load(f"wmt14.py:{size},v2")
  inside = ("attention_dropout_rate", "feed_forward_dropout_rate")
  assert (v1.model.norm, *(v1.model[name] for name in inside)) == ("post", 0.0, 0.0)
  assert (v2.model.norm, *(v2.model[name] for name in inside)) == ("pre", 0.1, 0.1)
  width = dict(base=512, big=1024)[size]
  # rate * width**-0.5 * min(t**-0.5, t * warmup**-1.5)
  formula = lambda t, rate, warmup: rate * width**-0.5 * min(t**-0.5, t * warmup**-1.5)
  updates = (1, 1000, 4000, 8000, 100_000)
  assert rates(v1, *updates) == pytest.approx([formula(t, 1, 4000) for t in updates])
  assert rates(v2, *updates) == pytest.approx([formula(t, 2, 8000) for t in updates])


@pytest.mark.parametrize("size, extra", [("base", 405_504), ("big", 26_112)])
def test_parameters_are_those_of_the_paper(size, extra):
  # Attention has four projections, only feed-forwards have biases, norms have two
  # vectors.
  relative, sinusoidal = load(f"wmt14.py:{size}"), load(f"wmt14.py:{size},sinusoidal")
  width, hidden = sinusoidal.model.width, sinusoidal.model.feed_forward
  attention, norm = 4 * width**2, 2 * width
  feed_forward = 2 * width * hidden + hidden + width
  encoder, decoder = (
    attention + feed_forward + 2 * norm,
    2 * attention + feed_forward + 3 * norm,
  )
  total = VOCABULARY * width + 6 * (encoder + decoder)
  assert num_parameters(sinusoidal) == total
  assert num_parameters(relative) == total + extra
  if size == "base":
    assert (
      num_parameters(load("wmt14.py:v2")) == total + extra + 2 * norm
    )  # of each stack's end


def test_batches_have_the_papers_number_of_tokens():
  lengths = np.random.default_rng(0).lognormal(np.log(24), 0.6, 100_000).astype(int) + 1
  lengths[0] = 256
  config, mesh = load("wmt14.py"), make_mesh()
  shapes = configure_batches(config, lengths, mesh, kind=Schedule)(
    lengths, seed=0
  ).shapes
  assert shapes[-1] == longest_shape(config, mesh.shape)
  assert len(shapes) == 8 and shapes[-1][1] == 256
  for rows, length in shapes:
    assert rows % 8 == 0 and 0.99 < rows * length / 32_768 < 1 + 8 * length / 32_768


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
  "sizes", [dict(data=4, fsdp=2), dict(data=2, sequence=4), dict(data=1, sequence=8)]
)
def test_the_examples_of_a_step_do_not_depend_on_the_mesh(sizes, ring):
  lengths = np.random.default_rng(0).integers(1, 40, 2000)
  config = load("quickstart.py")
  config.batches.update(max_length=35, num_shapes=4)
  config.mesh.ring = ring

  one, mesh = make_mesh(data=1), make_mesh(**sizes)
  alone, sharded = (
    configure_batches(config, lengths, x, kind=Schedule)(lengths, seed=0)
    for x in (one, mesh)
  )
  assert (
    sharded.num_per_epoch == alone.num_per_epoch and sharded.dropped == alone.dropped
  )
  for step in range(2 * alone.num_per_epoch):
    np.testing.assert_array_equal(sharded.order(step), alone.order(step))
  num_rows, num_tokens = multiples(mesh.shape, ring)
  for rows, length in sharded.shapes:
    assert rows % num_rows == length % num_tokens == 0
  assert sharded.shapes[-1] == longest_shape(config, mesh.shape)


@pytest.mark.parametrize(
  "config, words",
  [
    ([], "config.json is no JSON object"),
    (None, "config.json is no JSON object"),
    (dict(task=["a"]), "config.task is ['a']: choose one of translation, "),
    (
      dict(model=None),
      "config.model is None: give a group of values, as in configs/default.py",
    ),
    (dict(model=["a"]), "config.model is ['a']: give a group of values"),
    (dict(decoding=3), "config.decoding is 3: give a group of values"),
    (dict(model=dict(width=None)), "config.model.width is None: give a value, as in "),
    (
      dict(data=dict(pairs=dict(test=None))),
      "config.data.pairs.test is None: give a value",
    ),
  ],
)
def test_a_config_of_another_form_is_refused(config, words, tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(config))
  assert words in refusal(load_config, tmp_path)


def test_arguments_are_orthogonal_and_come_in_any_order():
  of_positions = {
    f"model.{x}" for x in ("positions", "relative_values", "beyond", "max_distance")
  }
  for file, arguments in ARGUMENTS.items():
    for argument in arguments:
      kind, recipe = argument.split(",")
      config = load(f"{file}:{argument}")
      assert {*changes(config, load(f"{file}:{recipe}"))} - {"name"} <= of_positions
      assert {*changes(config, load(f"{file}:{recipe},{kind}"))} <= {"name"}
  for wrong in ("brief,published", "relative,none", "mine"):
    with pytest.raises(InputError, match=r"unknown|exclude"):
      load(f"music.py:{wrong}")
  assert load("music.py:published").batches.max_length >= LONGEST_CHORALE


def plan(name: str, seeds: int = 1) -> list[cells_module.PlannedRun]:
  """Returns the cells of a sweep without checking their configs."""
  file = command.parse(dict(config=command.SWEEP), [f"--config=configs/{name}"])[
    "config"
  ]
  with mock.patch("experiments.systems.parse_config"):
    return cells_module.plan_runs(file, seeds, pathlib.Path("runs"))


def rows(name: str) -> dict:
  """Returns the config of each row of a sweep."""
  arguments = {cell.configuration: cell.command[3:-1] for cell in plan(name)}
  flags = dict(config=command.CONFIG)
  return {
    row: command.parse(flags, words)["config"] for row, words in arguments.items()
  }


GRAPHS = [f"graph.py:{source}" for source in ("clutrr", "tu", "mutagenicity")]


@pytest.mark.parametrize(
  "name",
  [*SWEEP_FILES[::2], *SWEEP_FILES[-1:], "table1.py:published", "music.py", *GRAPHS],
)
def test_every_sweep_has_a_base_cell_and_equal_budgets(name):
  # Rows are valid and change the model only; all sweeps of Multi30k have the same base
  # cell.
  base = load(name)
  for config in rows(name).values():
    parse_config(config, num_devices=1)
    assert all(key.startswith("model.") for key in changes(config, base))
  if name.partition(".")[0] in SWEEPS:
    recipe = "published" if "published" in name else "brief"
    assert set(changes(base, load(f"multi30k.py:{recipe}"))) == {"name"}


def test_multi30k_has_the_published_number_of_parameters():
  # The baseline has biases in four projections of each of three attentions a layer.
  biases = 4 * (1 + 2) * 4 * 128
  assert num_parameters(load("multi30k.py:sinusoidal"), ENTRIES) + biases == 2_568_192


def test_the_prepared_text_gives_the_published_vocabulary(shared_data):
  folder = shared_data / "multi30k" / "bpe10k_en-de"
  config = load(
    "multi30k.py:sinusoidal,published,prepared", f"data.multi30k.path={folder}"
  )
  tokenizer = learn_tokenizer(config, load_data(config))
  assert tokenizer.get_vocab_size() == ENTRIES == 8 * 1214


def test_the_documented_config_of_ones_own_works_anywhere(tmp_path):
  doc = inspect.cleandoc(default.__doc__)
  code = doc[doc.index("from configs import default") :]
  file = tmp_path / "mine.py"
  file.write_text(textwrap.dedent(f"  {code}"))
  config = command.parse(dict(config=command.CONFIG), [f"--config={file}"])["config"]
  parse_config(config)
  assert (config.name, config.data.source) == ("mine", "pairs")
  assert config.data.pairs.valid == "valid.en,valid.de"


def test_test_sets_have_names():
  def names_and_files(text):
    config = load("default.py", "data.source=pairs", f"data.pairs.test={text}")
    return parse_test_files(parse_config(config))

  assert names_and_files("") == {}
  assert names_and_files("a.tsv") == {"test": "a.tsv"}
  assert names_and_files("long=b.tsv") == {"long": "b.tsv"}
  both = {"test": "a.tsv", "long": "b.en,b.de"}
  assert names_and_files("a.tsv;long=b.en,b.de") == both
  assert names_and_files("sets/of=2/a.tsv") == {"test": "sets/of=2/a.tsv"}
  with pytest.raises(InputError, match=r"config\.data\.pairs\.test has long twice"):
    names_and_files("long=a.tsv;long=b.tsv")
  with pytest.raises(InputError, match=r"unknown config\.data\.pairs\.test\.long"):
    load("default.py", "data.pairs.test.long=a.tsv")


def test_a_run_with_test_sets_by_name_is_read(tmp_path):
  config = default.get_config().to_dict()
  config["data"]["source"] = "pairs"
  config["data"]["pairs"]["test"] = {"test": "a.tsv", "long": "b.en,b.de"}
  (tmp_path / "config.json").write_text(json.dumps(config))
  files = parse_test_files(load_config(tmp_path))
  assert files == {"test": "a.tsv", "long": "b.en,b.de"}


@pytest.mark.parametrize(
  "name", ["train", "evaluate", "translate", "report", "sweep", "plan", "export"]
)
def test_the_examples_of_help_parse(call, name):
  answer = call(name, "--help")
  assert (answer.status, answer.err, answer.compiled) == (0, "", [])
  assert all(len(line) <= 110 for line in answer.out.splitlines())
  pattern = rf"python -m experiments\.{name} ([^\n>|]*)"
  examples = re.findall(pattern, answer.out.replace("\\\n", ""))
  flags = importlib.import_module(f"experiments.{name}").FLAGS
  assert examples and all(
    command.parse(flags, shlex.split(example)) for example in examples
  )


_AVERAGING = ("multi30k.py", "multi30k.py:brief", "multi30k.py:published")
_AVERAGING += ("music.py", "music.py:published", "wmt14.py:big")


@pytest.mark.parametrize("name", _AVERAGING)
def test_the_checkpoints_that_a_recipe_averages_are_in_the_last_fifth(name):
  config = load(name)
  training, num = config.training, config.decoding.average_checkpoints
  assert num > 1 and training.num_steps % training.save_every == 0
  first = training.num_steps - (num - 1) * training.save_every
  assert first >= max(0.8 * training.num_steps, training.warmup_steps)


RESULTS = pathlib.Path(__file__).parents[2] / "results" / "runs"


def documented_sweeps() -> dict[str, str]:
  """Returns the documented sweeps: the name of their results and their config."""
  files = [*pathlib.Path("configs").glob("*.py"), pathlib.Path("experiments/sweep.py")]
  pattern = r"experiments\.sweep --config=(configs/[\w.:,]*\w)"
  names = [name for file in files for name in re.findall(pattern, file.read_text())]
  return {
    load(name.removeprefix("configs/")).name: name.removeprefix("configs/")
    for name in names
  }


def repeated(name: str) -> tuple[str, int, list[str], str]:
  """Returns the config, the seeds, the rows and the minutes above the table of a sweep."""
  pages = "".join(page.read_text("utf-8") for page in RESULTS.parent.glob("*.md"))
  block = re.search(
    f"<!-- begin {name} -->\n```\n(.*?)\n```\n\n(.*?)\n", pages, re.DOTALL
  )
  names, seeds = [], set()
  for line in block[1].splitlines():
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "experiments.sweep"]
    values = command.parse(cells_module.FLAGS, words[3:])
    config = values["config"].name.removeprefix("configs/")
    assert values["results"].name == "mine"
    all_rows = [row for row, _ in values["config"].module.sweep()]
    names += [values["only"]] if values["only"] else all_rows
    seeds.add(values["seeds"])
  (num_seeds,) = seeds
  return (
    config,
    num_seeds,
    names,
    re.search(r"trainings?, ([\d,]+) minutes", block[2])[1],
  )


@pytest.mark.parametrize("name, file", sorted(record_files(RESULTS).items()))
def test_a_documented_sweep_finds_its_committed_records(name, file):
  """Compares configs: a sweep trains again the cells whose record is of an older recipe."""
  lines = read_records(file)
  config, num_seeds, names, minutes = repeated(name)
  assert minutes == f"{sum(line['budget']['minutes'] for line in lines):,.0f}"
  records = {(line["row"], line["seed"]): digest(line["config"]) for line in lines}
  seeds = {seed for _, seed in records}
  assert num_seeds == len(seeds) and {*names} == {row for row, _ in records}
  assert name in documented_sweeps()
  cells = plan(config, seeds=num_seeds)
  assert (
    records
    and records.items()
    <= {(cell.configuration, cell.seed): cell.digest for cell in cells}.items()
  )
  assert all(x["digest"] == digest(x["config"], x.get("recipe", 1)) for x in lines)
