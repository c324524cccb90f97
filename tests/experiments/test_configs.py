"""Every config is valid, and the configs of the paper have the paper's numbers."""

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


POSITIONS = ("relative", "sinusoidal", "both", "none")
RECIPES = ("brief", "short", "published")
MULTI30K = [",".join(words) for words in itertools.product(POSITIONS, RECIPES)]
KINDS = ("relative", "clipped", "sinusoidal", "none")
MUSIC = [",".join(words) for words in itertools.product(KINDS, ("brief", "published"))]
ARGUMENTS = {"music.py": MUSIC, "multi30k.py": MULTI30K}
SWEEPS = ("table1", "table2", "table3", "sharing", "beyond")
BRIEF = [f"{name}.py" for name in SWEEPS]
PUBLISHED = [f"{name}:published" for name in BRIEF]
LENGTHS = ["lengths.py:embedded", "lengths.py:scan"]
VALID = """
default.py quickstart.py multi30k.py wmt14.py music.py music.py:published,clipped
music.py:none multi30k.py:brief multi30k.py:short multi30k.py:published
multi30k.py:both multi30k.py:none multi30k.py:sinusoidal,published,prepared
wmt14.py:big,enfr,sinusoidal,v2 lengths.py:embedded lengths.py
graph.py graph.py:tu graph.py:mutagenicity
"""


@pytest.mark.parametrize("name", VALID.split())
def test_every_config_is_valid(name):
  parse_config(load(name))


def test_no_two_experiments_share_a_folder():
  choices = ("base", "big"), ("ende", "enfr"), POSITIONS[:2], ("v1", "v2")
  files = [f"wmt14.py:{','.join(words)}" for words in itertools.product(*choices)]
  for file, arguments in ARGUMENTS.items():
    files += [f"{file}:{argument}" for argument in arguments]
  files += [*BRIEF, *PUBLISHED, *LENGTHS, "default.py", "quickstart.py"]
  names = {load(file).name for file in files}
  assert len(names) == len(files)


@pytest.mark.parametrize("size", ["base", "big"])
def test_the_two_recipes_of_the_time(size):
  # Tensor2tensor of September 2017 and from October 2017 on.
  v1, v2 = load(f"wmt14.py:{size},v1"), load(f"wmt14.py:{size},v2")
  assert (v1.model.norm, v2.model.norm) == ("post", "pre")
  for name in ("attention_dropout_rate", "feed_forward_dropout_rate"):
    assert (v1.model[name], v2.model[name]) == (0.0, 0.1)
  width = {"base": 512, "big": 1024}[size]
  updates = np.array([1, 1000, 4000, 8000, 100_000], float)
  for config, rate, warmup in ((v1, 1, 4000), (v2, 2, 8000)):
    rising, falling = updates * warmup**-1.5, updates**-0.5
    wanted = rate * width**-0.5 * np.minimum(rising, falling)
    found = [learning_rate(config)(update - 1) for update in updates]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("size, extra", [("base", 405_504), ("big", 26_112)])
def test_parameters_are_those_of_the_paper(size, extra):
  # Four projections of attention, biases in feed-forwards alone, norms of two vectors.
  relative, sinusoidal = load(f"wmt14.py:{size}"), load(f"wmt14.py:{size},sinusoidal")
  width, hidden = sinusoidal.model.width, sinusoidal.model.feed_forward
  attention, norm = 4 * width**2, 2 * width
  feed_forward = 2 * width * hidden + hidden + width
  encoder = attention + feed_forward + 2 * norm
  decoder = 2 * attention + feed_forward + 3 * norm
  total = VOCABULARY * width + 6 * (encoder + decoder)
  assert num_parameters(sinusoidal) == total
  assert num_parameters(relative) == total + extra
  if size == "base":
    both_ends = 2 * norm  # of the encoder and the decoder
    assert num_parameters(load("wmt14.py:v2")) == total + extra + both_ends


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
    assert rows % 8 == 0
    assert 0.99 * 32_768 < rows * length < 32_768 + 8 * length


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
  "sizes", [dict(data=4, fsdp=2), dict(data=2, sequence=4), dict(data=1, sequence=8)]
)
def test_the_examples_of_a_step_do_not_depend_on_the_mesh(sizes, ring):
  lengths = np.random.default_rng(0).integers(1, 40, 2000)
  config = load("quickstart.py")
  config.batches.update(max_length=35, num_shapes=4)
  config.mesh.ring = ring

  mesh = make_mesh(**sizes)
  alone, sharded = (
    configure_batches(config, lengths, x, kind=Schedule)(lengths, seed=0)
    for x in (make_mesh(data=1), mesh)
  )
  assert sharded.num_per_epoch == alone.num_per_epoch
  assert sharded.dropped == alone.dropped
  for step in range(2 * alone.num_per_epoch):
    np.testing.assert_array_equal(sharded.order(step), alone.order(step))
  num_rows, num_tokens = multiples(mesh.shape, ring)
  for rows, length in sharded.shapes:
    assert rows % num_rows == length % num_tokens == 0
  assert sharded.shapes[-1] == longest_shape(config, mesh.shape)


NO_GROUP = "config.model is None: give a group of values, as in configs/default.py"


@pytest.mark.parametrize(
  "config, words",
  [
    ([], "config.json is no JSON object"),
    (None, "config.json is no JSON object"),
    ({"task": ["a"]}, "config.task is ['a']: choose one of translation, "),
    ({"model": None}, NO_GROUP),
    ({"model": ["a"]}, "config.model is ['a']: give a group of values"),
    ({"decoding": 3}, "config.decoding is 3: give a group of values"),
    ({"model": {"width": None}}, "config.model.width is None: give a value, as in "),
    (
      {"data": {"pairs": {"test": None}}},
      "config.data.pairs.test is None: give a value",
    ),
  ],
)
def test_a_config_of_another_form_is_refused(config, words, tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(config))
  assert words in refusal(load_config, tmp_path)


KEYS_OF_POSITIONS = {"name", "model.positions", "model.relative_values"}
KEYS_OF_POSITIONS |= {"model.beyond", "model.max_distance"}


@pytest.mark.parametrize("file", ARGUMENTS)
def test_arguments_are_orthogonal_and_come_in_any_order(file):
  for argument in ARGUMENTS[file]:
    kind, recipe = argument.split(",")
    config = load(f"{file}:{argument}")
    assert {*changes(config, load(f"{file}:{recipe}"))} <= KEYS_OF_POSITIONS
    assert {*changes(config, load(f"{file}:{recipe},{kind}"))} <= {"name"}


@pytest.mark.parametrize("argument", ["brief,published", "relative,none", "mine"])
def test_wrong_arguments_are_refused(argument):
  with pytest.raises(InputError, match=r"unknown|exclude"):
    load(f"music.py:{argument}")


def test_the_longest_chorale_fits():
  assert load("music.py:published").batches.max_length >= LONGEST_CHORALE


def plan(name: str, seeds: int = 1) -> list[cells_module.PlannedRun]:
  """Returns the cells of a sweep without checking their configs."""
  file = parse(command.SWEEP, f"--config=configs/{name}")
  with mock.patch("experiments.systems.parse_config"):
    return cells_module.plan_runs(file, seeds, pathlib.Path("runs"))


GRAPHS = [f"graph.py:{source}" for source in ("clutrr", "tu", "mutagenicity")]


OTHERS = [*LENGTHS, "table1.py:published", "music.py", *GRAPHS]


@pytest.mark.parametrize("name", [*BRIEF, *OTHERS])
def test_every_sweep_has_a_base_cell_and_equal_budgets(name):
  # Rows are valid and change the model alone; Multi30k's sweeps have one base cell.
  base = load(name)
  for cell in plan(name):
    config = parse(command.CONFIG, *cell.command[3:-1])
    parse_config(config, num_devices=1)
    assert all(key.startswith("model.") for key in changes(config, base))
  if name in BRIEF:
    assert {*changes(base, load("multi30k.py:brief"))} == {"name"}
  elif name in PUBLISHED:
    assert {*changes(base, load("multi30k.py:published"))} == {"name"}


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
  config = load("default.py", "data.source=pairs", f"data.pairs.test={text}")
  assert parse_test_files(parse_config(config)) == files


def test_names_of_test_sets_differ_and_are_no_keys():
  config = load("default.py", "data.source=pairs", "data.pairs.test=long=a;long=b")
  with pytest.raises(InputError, match=r"config\.data\.pairs\.test has long twice"):
    parse_test_files(config)
  with pytest.raises(InputError, match=r"unknown config\.data\.pairs\.test\.long"):
    load("default.py", "data.pairs.test.long=a.tsv")


def test_a_run_with_test_sets_by_name_is_read(tmp_path):
  config = default.get_config().to_dict()
  files = {"test": "a.tsv", "long": "b.en,b.de"}
  config["data"]["source"] = "pairs"
  config["data"]["pairs"]["test"] = files
  (tmp_path / "config.json").write_text(json.dumps(config))
  assert parse_test_files(load_config(tmp_path)) == files


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


AVERAGING = "multi30k.py multi30k.py:brief multi30k.py:published"
AVERAGING += " music.py music.py:published wmt14.py:big"


@pytest.mark.parametrize("name", AVERAGING.split())
def test_the_checkpoints_that_a_recipe_averages_are_in_the_last_fifth(name):
  config = load(name)
  training, num = config.training, config.decoding.average_checkpoints
  assert num > 1
  assert training.num_steps % training.save_every == 0
  first = training.num_steps - (num - 1) * training.save_every
  assert first >= max(0.8 * training.num_steps, training.warmup_steps)


RESULTS = pathlib.Path(__file__).parents[2] / "results" / "runs"


def read_pages(paths) -> str:
  return "".join(path.read_text("utf-8") for path in paths)


def documented_sweeps() -> set[str]:
  """Returns the names of the results of documented sweeps."""
  text = read_pages(pathlib.Path("configs").glob("*.py"))
  text += pathlib.Path("experiments/sweep.py").read_text()
  files = re.findall(r"experiments\.sweep --config=configs/([\w.:,]*\w)", text)
  return {load(file).name for file in files}


def section(name: str) -> tuple[list[dict], str]:
  """Returns the flags of the commands above the table of a sweep, and its minutes."""
  pages = read_pages(RESULTS.parent.glob("*.md"))
  pattern = f"<!-- begin {name} -->\n```\n(.*?)\n```\n\n(.*?)\n"
  commands, sentence = re.search(pattern, pages, re.DOTALL).groups()
  flags = []
  for line in commands.splitlines():
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "experiments.sweep"]
    flags.append(command.parse(cells_module.FLAGS, words[3:]))
  return flags, re.search(r"trainings?, ([\d,]+) minutes", sentence)[1]


@pytest.mark.parametrize("name, file", sorted(record_files(RESULTS).items()))
def test_a_documented_sweep_finds_its_committed_records(name, file):
  """Compares configs: a sweep trains again what has a record of an older recipe."""
  lines = read_records(file)
  assert lines
  flags, minutes = section(name)
  assert minutes == f"{sum(line['budget']['minutes'] for line in lines):,.0f}"
  assert name in documented_sweeps()

  seeds = {line["seed"] for line in lines}
  names = set()
  for values in flags:
    assert values["results"].name == "mine"
    assert values["seeds"] == len(seeds)
    rows = [row for row, _ in values["config"].module.sweep()]
    names |= {values["only"]} if values["only"] else {*rows}
  assert names == {line["row"] for line in lines}

  config = flags[0]["config"].name.removeprefix("configs/")
  cells = {(x.configuration, x.seed): x.digest for x in plan(config, seeds=len(seeds))}
  for line in lines:
    assert cells[line["row"], line["seed"]] == digest(line["config"])
    assert line["digest"] == digest(line["config"], line.get("recipe", 1))
