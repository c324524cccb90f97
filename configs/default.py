"""Defines the values of a config, with the paper's base model as the default.

Change a value on the command line with `--config.model.max_distance=4`, or write a
config of your own, in any folder:

  from configs import default

  def get_config():
    config = default.get_config()
    config.name = "mine"
    config.data.source = "pairs"
    config.data.pairs.train = "train.en,train.de"
    config.data.pairs.valid = "valid.en,valid.de"
    config.data.pairs.test = "test.tsv"
    return config
"""

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

MOST_STEPS = 2**31 - 1  # the state counts steps in int32
LARGEST = 2**24  # for the size of an axis


class Limited(NamedTuple):
  """Holds a default value, and a check of the values that may replace it."""

  default: Any
  allows: Callable[[Any], bool]
  remedy: str


def one_of(default: str, *others: str) -> Limited:
  """Returns a limited value: the default, or one of the other words."""
  words = (default, *others)
  return Limited(default, words.__contains__, f"choose one of {', '.join(words)}")


def number(default: float, least: float, most: float = LARGEST) -> Limited:
  """Returns a limited value: a number from `least` to `most`."""
  remedy = f"give a number from {least} to {most:,}"
  return Limited(default, lambda x: least <= x <= most, remedy)


def rate(default: float) -> Limited:
  """Returns a limited value: a number from 0 to below 1."""
  remedy = "give a number from 0 to below 1"
  return Limited(default, lambda x: 0 <= x < 1, remedy)


def positive(default: float) -> Limited:
  """Returns a limited value: a finite number above 0."""
  return Limited(default, lambda x: 0 < x < float("inf"), "give a number above 0")


def choose(argument: str, *groups: Collection[str]) -> list[str]:
  """Parses a config's argument; returns one word of each group.

  The argument holds words, separated by commas. For a group without a word in it, the
  group's first word is returned. Raises ValueError for an unknown word, and for several
  words of one group.
  """
  words = list(filter(None, argument.split(",")))
  known = list(itertools.chain(*groups))
  for word in words:
    if word not in known:
      raise ValueError(f"unknown argument {word!r}: use {', '.join(known)}")
  chosen = []
  for group in groups:
    candidates = [word for word in words if word in group]
    if len(candidates) > 1:
      raise ValueError(f"{' and '.join(candidates)} exclude each other: give one")
    chosen.append(candidates[0] if candidates else next(iter(group)))
  return chosen


def get_config(task: str = "translation") -> ConfigDict:
  """Returns the default config of a task: a key of TASKS."""
  config = ConfigDict(dict(task=task))
  for group in (_COMMON, TASKS[task]):
    config.update(_defaults(group))
  return config


def limits(task: str) -> dict[str, Limited]:
  """Returns the limits of a task's values, by dotted key."""
  return _limits(_COMMON) | _limits(TASKS[task])


def _defaults(group: Mapping[str, Any]) -> dict[str, Any]:
  values = {}
  for key, value in group.items():
    if isinstance(value, Limited):
      value = value.default
    elif isinstance(value, dict):
      value = _defaults(value)
    values[key] = value
  return values


def _limits(group: Mapping[str, Any], prefix: str = "") -> dict[str, Limited]:
  limited = {}
  for key, value in group.items():
    if isinstance(value, Limited):
      limited[prefix + key] = value
    elif isinstance(value, dict):
      limited |= _limits(value, f"{prefix}{key}.")
  return limited


# The values that all tasks have.
_COMMON = dict(
  name="default",  # the run directory is runs/NAME unless --workdir is given
  seed=number(0, 0, 2**32 - 1),  # for parameters, batches and dropout
  # Devices along each axis of the mesh; one may be -1: all remaining devices.
  mesh=dict(
    data=-1,  # batches
    fsdp=1,  # batches and parameters
    tensor=1,  # heads and the feed-forward's hidden width
    sequence=1,  # tokens of each sequence
    ring=False,  # passes keys round a sequence's devices, instead of gathering them
  ),
  training=dict(
    num_steps=number(100_000, 0, MOST_STEPS),  # 0: num_epochs counts instead
    # Passes over the training data. All other numbers here are updates.
    num_epochs=number(0, 0, MOST_STEPS),
    # paper: learning_rate * width**-0.5 * min(step**-0.5, step * warmup_steps**-1.5).
    # inverse_sqrt: the same shape, with learning_rate at the end of the warmup.
    schedule=one_of("paper", "inverse_sqrt"),
    learning_rate=positive(1.0),
    warmup_steps=number(4000, 1, MOST_STEPS),
    num_microbatches=number(1, 1),  # per batch; their gradients are summed
    eval_every=number(2000, 1, MOST_STEPS),
    save_every=number(2000, 1, MOST_STEPS),
    keep_checkpoints=number(20, 1, MOST_STEPS),
    # This many non-finite steps in a row end the run.
    max_skipped=number(10, 1, MOST_STEPS),
  ),
  # Averages the last N checkpoints, but only those in the last fifth of the steps and
  # after the warmup. Earlier parameters make the mean worse. After 500 steps of
  # music.py the validation loss is 0.90. The mean of the last 8 checkpoints has 1.32,
  # the mean of the 3 in the last fifth 0.85.
  decoding=dict(average_checkpoints=number(1, 1, MOST_STEPS)),
)

# The layers of a model of sequences.
_LAYERS = dict(
  num_layers=number(6, 1, 1000),  # at most 1000, because each is traced
  width=number(512, 1),
  num_heads=number(8, 1),
  feed_forward=number(1024, 1),  # as in the paper; its code had 2048
  # relative, sinusoidal, both, none, t5, alibi, rotary, xl, content or deberta, or your
  # own module:Class: see docs/positions.md
  positions="relative",
  # Positions are clipped at this distance. It may be 0 in causal models.
  max_distance=number(16, 0),
  left=number(-1, -1),  # the clipping distance to the left; -1: max_distance
  tables_per_head=True,
  tables_per_layer=True,
  relative_keys=True,
  relative_values=True,
  beyond="clip",  # or zero
  norm="pre",  # or post
  embedding_dropout_rate=rate(0.1),
  dropout_rate=rate(0.1),
  attention_dropout_rate=rate(0.1),
  feed_forward_dropout_rate=rate(0.1),
  dtype="float32",  # or bfloat16; parameters stay float32
  implementation="",  # of attention; empty: the fastest
)
NO_DROPOUT = {key: 0.0 for key in _LAYERS if key.endswith("dropout_rate")}
_TRANSLATION = dict(
  data=dict(
    # Each source has its own options below.
    source=one_of("embedded", "multi30k", "pairs", "scan", "wmt14"),
    languages="en-de",  # from-to
    moses=False,  # normalise and tokenise as Moses does, before the vocabulary
    lowercase=False,
    embedded=dict(train_size=number(20_000, 1, 20_000)),  # the first pairs of 20,000
    multi30k=dict(
      path="",  # a folder of the captions' files; empty: download them
      prepared=False,  # the published baseline's text: Moses tokens, lower case, BPE
    ),
    # A folder of the files of SCAN's length split; empty: download them.
    scan=dict(path=""),
    wmt14=dict(),
    # Each is "source_file,target_file", "file.tsv", or "file.tsv:1,3" for two of more
    # columns. Give several test sets by name: "NAME=FILES;NAME=FILES".
    pairs=dict(train="", valid="", test=""),
  ),
  vocabulary=dict(  # one for both languages
    kind=one_of("bpe", "words"),  # words: for tokenised text
    size=number(32_768, 5),  # at least the special tokens and one word
  ),
  batches=dict(
    # Tokens of a batch on one side, with both sides padded to the longer one.
    tokens=number(4096, 1),
    # Training leaves out pairs with a longer side. Validation also leaves out pairs
    # longer than any in training.
    max_length=number(128, 1),
    num_shapes=number(6, 1),  # each is compiled once
  ),
  model=dict(
    **_LAYERS,
    share_embeddings=True,
    positions_in="all",  # or encoder or decoder; the other then has none
  ),
  training=dict(
    label_smoothing=rate(0.1),  # in the validation loss, too
    # The first validation sentences, which each evaluation translates greedily.
    num_samples=number(100, 1),
    # Also translates the first num_samples sentences of each test set: those longer
    # than batches.max_length, if there are any.
    score_tests=False,
  ),
  decoding=dict(
    beam_size=number(4, 1, 1024),
    length_penalty=number(0.6, 0),
    # bound is the rule of the paper's code; it takes more steps. See `beam_search`.
    stop=one_of("present", "bound"),
    extra_length=number(50, 0),  # largest length of a translation beyond its source's
  ),
  evaluation=dict(
    # sacreBLEU's tokenisers that need no download. Give none with data.moses.
    tokenize=one_of("13a", "intl", "zh", "char", "ja-mecab", "ko-mecab", "none"),
    lowercase=False,
    # The mark that ends a subword in the data, such as @@. Subwords are joined before
    # scoring.
    subword_mark="",
    # Also scores NAME_given: translations with the length of their reference.
    given_lengths=False,
  ),
)
_MUSIC = dict(
  data=dict(
    source=one_of("chorales", "midi"),  # each with its own options below
    chorales=dict(path=""),  # a folder of the chorales' file; empty: download it
    midi=dict(
      # A folder of MIDI files; its sub-folders train, valid and test are the splits.
      path="",
      # events: any music. voices: four voices on a grid of 16th notes.
      codec=one_of("events", "voices"),
    ),
    # Transposes training pieces by up to this many semitones, drawn anew in each epoch.
    transpose=number(0, 0, 127),
  ),
  batches=dict(
    tokens=number(8192, 1),  # of a batch, including padding
    max_length=number(2048, 1),  # longer pieces are split
    cut_anew=False,  # splits at other places in each epoch
    # Longer validation pieces are split for the loss, but not for the final scores.
    valid_length=number(4096, 1),
    num_shapes=number(4, 1),  # each is compiled once
  ),
  model=_LAYERS,
  training=dict(label_smoothing=rate(0.0)),
)
# For tasks whose sequences are not sharded.
_WHOLE_SEQUENCES = dict(
  sequence=Limited(1, lambda size: size == 1, "give 1 for this task")
)
_GRAPHS = dict(
  mesh=_WHOLE_SEQUENCES,
  data=dict(
    source=one_of("clutrr", "tu"),  # each with its own options below
    clutrr=dict(
      path="",  # a folder of the kinship graphs' file; empty: download it
      valid_share=number(0.1, 0.001, 0.999),  # share of the distinct training graphs
    ),
    tu=dict(
      name="MUTAG",  # or Mutagenicity, or the prefix of the files in `path`, or ""
      # Your own graphs: a folder or .zip in TU format, or a JSON file. For molecules,
      # the folder of their archives; empty: download them.
      path="",
      num_folds=number(10, 3),  # stratified
      # The fold for testing; the next one validates. -1: the seed chooses.
      fold=number(-1, -1),
    ),
  ),
  batches=dict(
    tokens=number(640, 1),  # nodes of a batch, including padding
    max_length=number(64, 1),  # training leaves out graphs with more nodes
    num_shapes=number(1, 1),  # each is compiled once
  ),
  model=dict(
    num_layers=number(3, 1, 1000),
    width=number(64, 1),
    num_heads=number(4, 1),
    feed_forward=number(128, 1),
    sees="all",  # the nodes that a node attends to; or neighbours
    reverse_edges="own_label",  # label of reversed edges; none: adds no such edges
    relative_keys=True,  # labels of edges on keys
    relative_values=True,
    tables_per_head=True,
    tables_per_layer=True,
    readout="mean",  # over a graph's nodes; or sum
    norm="pre",  # or post
    embedding_dropout_rate=rate(0.0),
    dropout_rate=rate(0.1),
    attention_dropout_rate=rate(0.0),
    feed_forward_dropout_rate=rate(0.0),
    dtype="float32",  # or bfloat16; parameters stay float32
    # Of attention. empty: the fastest; edge_list: for large sparse graphs.
    implementation="",
  ),
  training=dict(label_smoothing=rate(0.0)),
)
LENGTH_TASKS = (
  "missing_duplicate",
  "modular_arithmetic",
  "reverse_string",
  "bucket_sort",
  "stack_manipulation",
)
_LENGTH_TASKS = dict(
  mesh=_WHOLE_SEQUENCES,
  data=dict(
    # Generated: nothing is downloaded.
    source=one_of(*LENGTH_TASKS),
  ),
  batches=dict(
    tokens=number(5120, 1),  # of the inputs of a batch, without blanks
    max_length=number(40, 1),  # of training inputs, from 1 on
    num_shapes=number(8, 1),  # to which inputs are padded; each is compiled once
  ),
  model=dict(
    **_LAYERS,
    # Draws the positions of a batch from 0 to this number - 1; 0: they are 0, 1, 2, ...
    random_positions=number(0, 0),
    # The standard deviation of Shaw's initial tables; 0: Glorot's, as in other tasks.
    table_stddev=number(0.0, 0),
  ),
  training=dict(schedule=one_of("constant")),
  evaluation=dict(
    longest=number(500, 1),  # of the test inputs
    num_inputs=number(64, 1),  # of each length
  ),
)
TASKS = dict(
  translation=_TRANSLATION,
  music=_MUSIC,
  graphs=_GRAPHS,
  length_tasks=_LENGTH_TASKS,
)
