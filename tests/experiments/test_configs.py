"""Every config is valid, and those of the paper hold the paper's numbers."""

import collections
import gzip
import importlib
import inspect
import itertools
import pathlib
import re
import shlex
import textwrap
from unittest import mock

import jax
import numpy as np
import pytest
from flax import nnx

from configs import default
from experiments import command
from experiments import sweep_cells as cells_module
from experiments.config import changes, validate
from experiments.run import schedule
from relpos_jax.data.batching import Batches, pair_lengths
from relpos_jax.data.tokenizer import EOS, encode_pairs
from relpos_jax.errors import InputError
from relpos_jax.evaluation.records import digest, read_records
from relpos_jax.models.seq2seq import Transformer
from relpos_jax.translation.task import Translation, transformer_config

pytestmark = pytest.mark.usefixtures("in_the_repository")

VOCABULARY = 32_768  # "about", says the paper
LONGEST_CHORALE = 2065  # tokens of the longest to train on, with its end
ENTRIES = 9712  # of the published vocabulary of Multi30k


def load(name: str, *changes: str):
  """The config of a file, with an argument, as the commands have it."""
  arguments = [f"--config=configs/{name}", *(f"--config.{change}" for change in changes)]
  return command.parse(dict(config=command.CONFIG), arguments)["config"]


def num_parameters(config, vocabulary=VOCABULARY) -> int:
  make = lambda: Transformer(transformer_config(config, vocabulary, vocabulary), rngs=nnx.Rngs(0))
  shapes = nnx.state(nnx.eval_shape(make), nnx.Param)
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def digest_of(config) -> str:
  return digest(changes(config, default.get_config()))


def rates(config, *updates: int) -> list[float]:
  """The learning rate of updates, numbered from 1."""
  return [float(schedule(config)(update - 1)) for update in updates]


WMT14 = [*itertools.product(("base", "big"), ("ende", "enfr"), ("relative", "sinusoidal"))]
WMT14 = [",".join([*words, recipe]) for words in WMT14 for recipe in ("v1", "v2")]
POSITIONS = ("relative", "sinusoidal", "both", "none")
RECIPES = ("brief", "short", "published")
MULTI30K = [",".join(words) for words in itertools.product(POSITIONS, RECIPES)]
PREPARED = ("sinusoidal,published,prepared", "relative,published,prepared", "prepared")
KINDS = ("relative", "clipped", "sinusoidal", "none")
MUSIC = [",".join(words) for words in itertools.product(KINDS, ("brief", "published"))]
SWEEPS = ("table1", "table2", "table3", "sharing", "beyond", "lengths")
SWEEP_FILES = [f"{name}.py{argument}" for name in SWEEPS for argument in ("", ":published")]
SWEEP_FILES.append("lengths.py:embedded")


@pytest.mark.parametrize(
  "name",
  [
    *("default.py", "quickstart.py", "multi30k.py", "wmt14.py"),
    *("music.py", "music.py:published,clipped", "music.py:none"),
    *(f"multi30k.py:{argument}" for argument in (*MULTI30K, PREPARED[0])),
    *(f"wmt14.py:{argument}" for argument in WMT14),
    *("lengths.py:published", "lengths.py:embedded"),
  ],
)
def test_every_config_is_valid(name):
  validate(load(name))


def test_an_implementation_need_not_decode():
  """It is of training: a decoder takes another."""
  validate(load("quickstart.py", "model.implementation=chunked"))


def test_no_two_experiments_share_a_folder():
  files = [f"multi30k.py:{x}" for x in (*MULTI30K, *PREPARED)] + [f"wmt14.py:{x}" for x in WMT14]
  files += [f"music.py:{x}" for x in MUSIC]
  names = [load(name).name for name in [*files, *SWEEP_FILES, "default.py", "quickstart.py"]]
  assert len({*names}) == len(names)


def test_the_papers_base_model():
  """Shaw et al. 2018, sections 4.1 and 4.2."""
  config = load("wmt14.py:base,ende,relative")
  model = config.model
  assert (model.num_layers, model.width, model.num_heads, model.feed_forward) == (6, 512, 8, 1024)
  assert (model.positions, model.max_distance, model.tables_per_head) == ("relative", 16, True)
  assert model.tables_per_layer and model.relative_keys and model.relative_values
  assert model.beyond == "clip" and model.share_embeddings and config.vocabulary.joint
  assert config.vocabulary.size == VOCABULARY
  assert model.embedding_dropout_rate == model.dropout_rate == 0.1
  assert config.training.label_smoothing == 0.1 and config.training.schedule == "paper"
  assert config.batches.tokens == 8 * 4096  # of eight accelerators
  assert config.training.num_steps == 100_000 and config.decoding.average_checkpoints == 1
  assert (config.data.source, config.data.languages) == ("wmt14", "en-de")


def test_the_papers_big_model():
  config = load("wmt14.py:big,ende,relative")
  model = config.model
  assert (model.num_layers, model.width, model.num_heads, model.feed_forward) == (6, 1024, 16, 4096)
  assert (model.max_distance, model.tables_per_head, model.tables_per_layer) == (8, False, True)
  assert model.embedding_dropout_rate == model.dropout_rate == 0.3
  assert config.training.num_steps == 300_000
  assert config.decoding.average_checkpoints == 20 <= config.training.keep_checkpoints
  assert config.training.save_every == 600  # 10 minutes, of a second an update


@pytest.mark.parametrize(
  "size, languages, dropout",
  [("base", "ende", 0.1), ("base", "enfr", 0.1), ("big", "ende", 0.3), ("big", "enfr", 0.1)],
)
def test_the_languages_and_their_dropout(size, languages, dropout):
  config = load(f"wmt14.py:{languages},{size}")
  assert config.data.languages == dict(ende="en-de", enfr="en-fr")[languages]
  assert config.model.embedding_dropout_rate == config.model.dropout_rate == dropout


@pytest.mark.parametrize("size", ["base", "big"])
def test_the_two_recipes_of_the_time(size):
  """tensor2tensor of September 2017 and from October 2017 on."""
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


def test_decoding_is_that_of_the_paper():
  """Beam 4, length penalty 0.6, at most 50 tokens more than the source."""
  for argument in WMT14:
    decoding = load(f"wmt14.py:{argument}").decoding
    assert (decoding.beam_size, decoding.length_penalty, decoding.extra_length) == (4, 0.6, 50)


@pytest.mark.parametrize("size, extra", [("base", 405_504), ("big", 26_112)])
def test_parameters_are_those_of_the_paper(size, extra):
  """Four projections an attention, biases in the feed-forward alone, norms of two vectors."""
  relative, sinusoidal = load(f"wmt14.py:{size}"), load(f"wmt14.py:{size},sinusoidal")
  width, hidden = sinusoidal.model.width, sinusoidal.model.feed_forward
  attention, norm = 4 * width**2, 2 * width
  feed_forward = 2 * width * hidden + hidden + width
  encoder, decoder = attention + feed_forward + 2 * norm, 2 * attention + feed_forward + 3 * norm
  total = VOCABULARY * width + 6 * (encoder + decoder)
  assert num_parameters(sinusoidal) == total
  assert num_parameters(relative) == total + extra
  assert num_parameters(load(f"wmt14.py:{size},v2")) == total + extra + 2 * norm  # a stack's last


def test_multi30k_is_the_literatures_small_transformer():
  """GitHub LividWo/Revisit-MMT; the short recipe learns less long and with less dropout."""
  for argument in MULTI30K:
    config = load(f"multi30k.py:{argument}")
    model = config.model
    assert (model.num_layers, model.width, model.num_heads, model.feed_forward) == (4, 128, 4, 256)
    positions, _, recipe = argument.partition(",")
    assert (model.norm, model.positions) == ("pre" if recipe == "brief" else "post", positions)
    assert config.vocabulary.to_dict() == dict(kind="bpe", size=10_000, joint=True)
    assert config.data.moses and config.data.lowercase and config.evaluation.tokenize == "none"
  published = load("multi30k.py:sinusoidal,published")
  assert published.model.dropout_rate == published.model.embedding_dropout_rate == 0.3
  assert (published.batches.tokens, published.training.num_steps) == (8192, 8000)
  assert rates(published, 1000, 2000, 8000) == pytest.approx([0.0025, 0.005, 0.0025])
  assert (published.decoding.beam_size, published.decoding.average_checkpoints) == (5, 10)
  short = load("multi30k.py")
  assert (short.model.positions, short.model.max_distance) == ("relative", 16)
  assert (short.batches.tokens, short.training.num_steps, short.model.dropout_rate) == (
    *(1024, 5000),
    0.1,
  )
  assert rates(short, 1000) == pytest.approx([0.004])


def test_in_music_positions_and_recipe_are_orthogonal_and_come_in_any_order():
  of_positions = {"positions", "relative_values", "beyond", "max_distance"}
  for argument in MUSIC:
    kind, recipe = argument.split(",")
    config, base = load(f"music.py:{argument}"), load(f"music.py:{recipe}")
    assert {*changes(config, base)} - {"name"} <= {f"model.{name}" for name in of_positions}
    assert {*changes(config, load(f"music.py:{recipe},{kind}"))} <= {"name"}
    assert config.data.transpose > 0 and config.batches.max_length >= LONGEST_CHORALE
    assert config.decoding.average_checkpoints <= config.training.keep_checkpoints
  model = load("music.py:published").model
  assert (model.num_layers, model.width, model.feed_forward, model.num_heads) == (5, 256, 1024, 8)
  assert (model.positions, model.beyond, model.relative_values) == ("both", "zero", False)
  for wrong in ("brief,published", "relative,none", "mine"):
    with pytest.raises(InputError, match=r"unknown|exclude"):
      load(f"music.py:{wrong}")


def test_the_prepared_text_is_orthogonal_to_positions_and_recipe():
  text = dict.fromkeys(("data.moses", "data.lowercase"), False)
  text |= {"data.multi30k.prepared": True, "evaluation.subword_mark": "@@"}
  text["vocabulary.kind"] = "words"
  for argument in ("none,brief", "sinusoidal,published"):
    changed = changes(load(f"multi30k.py:prepared,{argument}"), load(f"multi30k.py:{argument}"))
    assert {key: changed[key] for key in changed if key != "name"} == text
  base = load("table1.py:prepared")
  assert {*changes(base, load("multi30k.py:prepared,brief"))} == {"name"}
  assert {*changes(load("table1.py:published,prepared"), base)} > {"training.num_steps"}


def test_the_brief_recipe_is_the_short_one_in_a_fifth_of_the_updates():
  brief, short = load("multi30k.py:brief"), load("multi30k.py:short")
  assert set(changes(brief, short)) == {
    *("name", "model.norm", "model.dropout_rate", "model.embedding_dropout_rate"),
    *("training.num_steps", "training.warmup_steps", "training.eval_every", "training.save_every"),
  }
  shared = lambda config: config.training.save_every * config.decoding.average_checkpoints
  for steps in (lambda c: c.training.num_steps, shared):
    assert steps(brief) == steps(short) / 5


def plan(name: str, seeds: int = 1) -> list[cells_module.Cell]:
  """The cells of a sweep with its first seeds, without a look whether they are valid."""
  file = command.parse(dict(config=command.SWEEP), [f"--config=configs/{name}"])["config"]
  with mock.patch.object(cells_module, "validate"):
    return cells_module.plan_cells(file, seeds, pathlib.Path("runs"))


def rows(name: str) -> dict:
  """The config of each row."""
  arguments = {cell.row: cell.command[3:-1] for cell in plan(name)}
  flags = dict(config=command.CONFIG)
  return {row: command.parse(flags, words)["config"] for row, words in arguments.items()}


def test_every_cell_is_valid():
  configs = [config for name in SWEEPS for config in rows(f"{name}.py").values()]
  for config in {digest_of(config): config for config in configs}.values():
    validate(config)


def test_every_job_has_a_name_of_its_own_that_xpk_takes():
  """Each sweep with its longest arguments; xpk's pattern and length."""
  files = [path for path in pathlib.Path("configs").glob("*.py") if "def sweep" in path.read_text()]
  assert {path.stem for path in files} == {*SWEEPS, "graph", "music"}
  longest = [*SWEEP_FILES, *(f"{name}.py:published,prepared" for name in SWEEPS)]
  longest += ["music.py:published", "graph.py:mutagenicity", "graph.py:clutrr", "graph.py:tu"]
  jobs = [
    cells_module.submission("{name} {command}", load(name).name, cell)[0]
    for name in longest
    for cell in plan(name, seeds=2)
  ]
  assert len(jobs) > 100 and len({*jobs}) == len(jobs)
  assert not [job for job in jobs if not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", job)]
  assert max(map(len, jobs)) == 40


@pytest.mark.parametrize("name", SWEEP_FILES)
def test_every_sweep_has_a_base_cell_and_equal_budgets(name):
  """All rows are the base cell but for the model; every sweep of Multi30k has the same one."""
  base = load(name)
  for config in rows(name).values():
    changed = changes(config, base)
    assert all(key.startswith("model.") for key in changed), changed
  if "embedded" not in name:
    recipe = "published" if "published" in name else "brief"
    expected = {"name"} | ({"batches.max_length"} if "lengths" in name else set())
    assert set(changes(base, load(f"multi30k.py:{recipe}"))) == expected


def test_the_rows_are_those_of_the_papers_tables():
  model = lambda name, *keys: {
    row: tuple(config.model[key] for key in keys) for row, config in rows(name).items()
  }
  assert model("table1.py", "positions") == {
    name: (name,) for name in ("relative", "sinusoidal", "both", "none")
  }
  assert model("table2.py", "positions", "max_distance") == {
    f"k={k}": ("relative", k) for k in (0, 1, 2, 4, 16, 64)
  }
  assert model("table3.py", "positions", "relative_keys", "relative_values") == {
    "keys and values": ("relative", True, True),
    "keys": ("relative", True, False),
    "values": ("relative", False, True),
    "neither": ("none", True, True),
  }
  assert {*model("sharing.py", "tables_per_head", "tables_per_layer").values()} == {
    *itertools.product((True, False), repeat=2)
  }
  assert {*model("beyond.py", "max_distance", "beyond").values()} == {
    *itertools.product((4, 16), ("clip", "zero"))
  }
  assert [*model("lengths.py", "positions", "max_distance").values()] == [
    *(("relative", 4), ("relative", 16), ("sinusoidal", 16), ("none", 16))
  ]


def test_what_several_tables_have_in_common_is_trained_once():
  """The base cell is a row of five of them, no positions of two, k = 4 of two."""
  digests = [cell.digest for name in SWEEPS[:-1] for cell in plan(f"{name}.py")]
  counts = collections.Counter(digests)
  base = digest_of(load("multi30k.py:brief"))
  assert counts[base] == 5 and sorted(counts.values())[:-1] == [1] * 13 + [2, 2]


def test_pairs_longer_than_15_tokens_do_not_train_for_the_length_curves():
  """The end mark counts in batches.max_length."""
  assert load("lengths.py").batches.max_length == load("lengths.py:published").batches.max_length
  config = load("lengths.py")
  batches = Batches(
    [[5] * length + [EOS] for length in (1, 14, 15, 16)],
    [[5, EOS]] * 4,
    boundaries=(config.batches.max_length,),
    token_budget=config.batches.tokens,
    seed=0,
  )
  assert batches.dropped == 1


def test_18516_pairs_are_that_short_with_the_published_vocabulary(shared_data):
  """SOURCES.md; 267 test pairs are longer by their source alone, 329 by their longer side."""
  folder = shared_data / "multi30k" / "bpe10k_en-de"

  def lengths(split):
    texts = (gzip.decompress((folder / f"{split}.{side}.gz").read_bytes()) for side in ("en", "de"))
    columns = ([len(line.split()) for line in text.decode().split("\n")[:-1]] for text in texts)
    return np.column_stack([*columns])

  longest = load("lengths.py").batches.max_length - 1
  assert (lengths("train").max(1) <= longest).sum() == 18_516
  test = lengths("test.2016")
  assert ((test[:, 0] > longest).sum(), (test[:, 0] > 20).sum()) == (267, 80)
  assert (test.max(1) > longest).sum() == 329


def test_training_pairs_of_the_embedded_corpus_reach_the_limit_of_their_lengths():
  """So that longer sentences are longer than all that trained. A tenth of the corpus shows it."""
  config = load("lengths.py:embedded", "data.embedded.train_size=2000")
  task, longest = Translation(config), config.batches.max_length
  data = task.load_data()
  vocabulary = task.learn_tokenizers(data)
  lengths = lambda name: pair_lengths(*encode_pairs(vocabulary, data.splits[name]))
  train = lengths("train")
  assert (train == longest).sum() > 0.01 * len(train)
  assert 0.85 < (train <= longest).mean() < 0.95
  assert (lengths("test") > longest).sum() > 30 and (lengths("long") > longest).all()


def test_multi30k_has_the_published_number_of_parameters():
  """But for the authors' biases: of four projections, in one attention a layer and two more."""
  biases = 4 * (1 + 2) * 4 * 128
  assert num_parameters(load("multi30k.py:sinusoidal"), ENTRIES) + biases == 2_568_192


def test_the_prepared_text_gives_the_published_vocabulary(shared_data):
  """fairseq counts four special tokens too, and has nothing to add to a multiple of 8."""
  folder = shared_data / "multi30k" / "bpe10k_en-de"
  config = load("multi30k.py:sinusoidal,published,prepared", f"data.multi30k.path={folder}")
  task = Translation(config)
  source, target = task.learn_tokenizers(task.load_data())
  assert source is target and source.get_vocab_size() == ENTRIES == 8 * 1214


def test_quickstart_needs_no_download():
  config = load("quickstart.py")
  assert (config.data.source, config.model.positions) == ("embedded", "relative")


def test_values_change_on_the_command_line():
  config = load("wmt14.py:big", "model.feed_forward=2048", "model.dropout_rate=0")
  assert (config.model.feed_forward, config.model.dropout_rate) == (2048, 0.0)


def test_the_documented_config_of_ones_own_works_anywhere(tmp_path):
  doc = inspect.cleandoc(default.__doc__)
  code = doc[doc.index("from configs import default") :]
  file = tmp_path / "mine.py"
  file.write_text(textwrap.dedent(f"  {code}"))
  config = command.parse(dict(config=command.CONFIG), [f"--config={file}"])["config"]
  validate(config)
  assert (config.name, config.data.source) == ("mine", "pairs")
  assert config.data.pairs.valid == "valid.en,valid.de"


@pytest.mark.parametrize("name", ["train", "evaluate", "translate", "report", "sweep"])
def test_help_teaches_by_examples_that_parse(call, name):
  answer = call(name, "--help")
  assert (answer.status, answer.err, answer.num_compilations) == (0, "", 0)
  assert all(len(line) <= 110 for line in answer.out.splitlines())
  examples = re.findall(rf"python -m experiments\.{name} ([^\n>]*)", answer.out.replace("\\\n", ""))
  flags = importlib.import_module(f"experiments.{name}").FLAGS
  assert examples and all(command.parse(flags, shlex.split(example)) for example in examples)


# The commands that the documents name, and the records that are committed ------------------------

RESULTS = pathlib.Path(__file__).parents[2] / "results" / "runs"


def documented_sweeps() -> dict[str, str]:
  """By the name of its results, the config of each sweep that the documents name."""
  files = [
    *pathlib.Path("configs").glob("*.py"),
    *map(pathlib.Path, ("README.md", "experiments/sweep.py")),
  ]
  pattern = r"experiments\.sweep --config=(configs/[\w.:,]*\w)"
  names = [name for file in files for name in re.findall(pattern, file.read_text())]
  return {load(name.removeprefix("configs/")).name: name.removeprefix("configs/") for name in names}


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.jsonl")), ids=lambda file: file.stem)
def test_a_documented_sweep_finds_its_committed_records(file):
  """All rows, with the seeds that were trained: the command trains none of them again."""
  records = {(record["row"], record["seed"]): record["digest"] for record in read_records(file)}
  seeds = {seed for _, seed in records}
  cells = plan(documented_sweeps()[file.stem], seeds=len(seeds))
  assert {(cell.row, cell.seed): cell.digest for cell in cells} == records
  assert all(record["digest"] == digest(record["config"]) for record in read_records(file))
