"""Defines every value of an experiment, by default of the paper's base model.

Change a value on the command line with `--config.model.max_distance=4`, or write a config of your
own, in any folder:

  from configs import default

  def get_config():
    config = default.get_config()
    config.name = "mine"
    config.data.source = "pairs"
    config.data.pairs.update(train="train.en,train.de", valid="valid.en,valid.de", test="test.tsv")
    return config
"""

from collections.abc import Collection

from ml_collections import ConfigDict


def choose(argument: str, *groups: Collection[str]) -> list[str]:
  """Returns the word of each group that is in a config's argument, by default the
  group's first.

  Raises ValueError for an unknown word, and for several of a group.
  """
  words = [word for word in argument.split(",") if word]
  known = [word for group in groups for word in group]
  for word in words:
    if word not in known:
      raise ValueError(f"unknown argument {word!r}: use {', '.join(known)}")
  found = [[word for word in words if word in group] for group in groups]
  for several in found:
    if len(several) > 1:
      raise ValueError(f"{' and '.join(several)} exclude each other: give one")
  return [(*given, *group)[0] for given, group in zip(found, groups, strict=True)]


def get_config(task: str = "translation") -> ConfigDict:
  """Returns the values of a task: translation, music or graphs."""
  config = ConfigDict(
    dict(
      name="default",  # the run directory is runs/NAME unless --workdir is given
      seed=0,  # for parameters, order of batches, dropout
      task=task,
      # Devices along each axis of the mesh; one may be -1: all remaining devices.
      mesh=dict(
        data=-1,  # batches
        fsdp=1,  # batches and parameters
        tensor=1,  # heads and the feed-forward's hidden width
        sequence=1,  # tokens of each sequence
        ring=False,  # keys of a sequence go round its devices, instead of being gathered
      ),
      training=dict(
        num_steps=100_000,  # or 0, and num_epochs
        num_epochs=0,  # passes over the training data; the other numbers here remain updates
        # paper: learning_rate * width**-0.5 * min(step**-0.5, step *
        # warmup_steps**-1.5); inverse_sqrt: learning_rate at the end of the warmup, the
        # same shape.
        schedule="paper",
        learning_rate=1.0,
        warmup_steps=4000,
        num_microbatches=1,  # per batch; their gradients are summed
        eval_every=2000,
        save_every=2000,
        keep_checkpoints=20,
        max_skipped=10,  # consecutive non-finite steps that end the run
      ),
      # At most so many are averaged: the last ones, in the last fifth of the steps and
      # after the warmup. Earlier parameters make the mean worse: after 500 steps of
      # music.py the valid loss is 0.90; of the mean of the last 8, 1.32; of the 3 of
      # them in the last fifth, 0.85.
      decoding=dict(average_checkpoints=1),
    )
  )
  config.update(TASKS[task])
  return config


# The layers of a model of sequences.
_LAYERS = dict(
  num_layers=6,
  width=512,
  num_heads=8,
  feed_forward=1024,  # as printed; the code of the time had 2048
  # relative, sinusoidal, both, none, t5, alibi, rotary, xl, content or deberta; or
  # module:Class of your own: docs/positions.md
  positions="relative",
  max_distance=16,  # at which positions are clipped
  left=-1,  # distance on the left; -1: max_distance, which may be 0 in causal models
  tables_per_head=True,
  tables_per_layer=True,
  relative_keys=True,
  relative_values=True,
  beyond="clip",  # or zero
  norm="pre",  # or post
  embedding_dropout_rate=0.1,
  dropout_rate=0.1,
  attention_dropout_rate=0.1,
  feed_forward_dropout_rate=0.1,
  dtype="float32",  # or bfloat16; parameters stay float32
  implementation="",  # of attention; empty: the fastest
)
NO_DROPOUT = {key: 0.0 for key in _LAYERS if key.endswith("dropout_rate")}
_TRANSLATION = dict(
  data=dict(
    source="embedded",  # embedded, multi30k, scan, wmt14 or pairs, with its own options below
    languages="en-de",  # from-to
    moses=False,  # normalise and tokenise as Moses does, before the vocabulary
    lowercase=False,
    embedded=dict(train_size=20_000),  # the first pairs of 20,000
    multi30k=dict(
      path="",  # a folder of the captions' files; empty: download them
      prepared=False,  # the published baseline's files: Moses tokens, lower case, BPE
    ),
    scan=dict(
      path=""
    ),  # a folder of the files of SCAN's length split; empty: download them
    wmt14=dict(),
    # Each "source_file,target_file", "file.tsv", or two columns of several,
    # "file.tsv:1,3". Several test sets have names: --config.data.pairs.test.NAME=FILES,
    # or test=dict(NAME=FILES, ...) in place of test="".
    pairs=dict(train="", valid="", test=""),
  ),
  vocabulary=dict(  # one for both languages
    kind="bpe",  # or words: for tokenised text
    size=32_768,
  ),
  batches=dict(
    tokens=4096,  # of a batch, by the longer side of each pair, padding included
    # Pairs with a longer side are dropped; of valid also those longer than any in
    # training.
    max_length=128,
    num_shapes=6,  # each is compiled once
  ),
  model=dict(
    **_LAYERS,
    share_embeddings=True,
    positions_in="all",  # or encoder, decoder: the other has none
  ),
  training=dict(
    label_smoothing=0.1,
    num_samples=100,  # valid sentences translated greedily at each evaluation
    score_tests=False,  # and as many of each test set, longer than in training if it has any
  ),
  decoding=dict(
    beam_size=4,
    length_penalty=0.6,
    stop="present",  # or bound, as in the paper's code, which takes more steps: see `beam_search`
    extra_length=50,  # maximum tokens of a translation beyond its source's
  ),
  evaluation=dict(
    tokenize="13a",  # sacreBLEU's; none where data.moses is on; zh, ja-mecab, ko-mecab
    lowercase=False,
    subword_mark="",  # ends a subword in the data, such as @@; words are joined before scoring
    given_lengths=False,  # scores NAME_given too: translations with the length of the reference
  ),
)
_MUSIC = dict(
  data=dict(
    source="chorales",  # or midi, with its own options below
    chorales=dict(path=""),  # a folder of the chorales' file; empty: download it
    midi=dict(
      path="",  # a folder of MIDI files; sub-folders train, valid and test are the splits
      codec="events",  # any music; or voices: four, on a grid of 16th notes
    ),
    transpose=0,  # training pieces, by up to this many semitones, drawn in each epoch
  ),
  batches=dict(
    tokens=8192,  # of a batch, padding included
    max_length=2048,  # longer pieces are split
    cut_anew=False,  # split at other positions in each epoch
    valid_length=4096,  # longer valid pieces are split during training, not when scored
    num_shapes=4,  # each is compiled once
  ),
  model=_LAYERS,
  training=dict(label_smoothing=0.0),
)
_GRAPHS = dict(
  data=dict(
    source="clutrr",  # or tu, with its own options below
    clutrr=dict(
      path="",  # a folder of the kinship graphs' file; empty: download it
      valid_share=0.1,  # share of the distinct training graphs
    ),
    tu=dict(
      name="MUTAG",  # or Mutagenicity, or the prefix of the files in `path`, or nothing
      # A folder or .zip in TU format, a file of graphs in JSON, or a folder of the
      # molecules' archives; empty: download them
      path="",
      num_folds=10,  # stratified
      fold=-1,  # for testing; the next one validates; -1: chosen by the seed
    ),
  ),
  batches=dict(
    tokens=640,  # nodes of a batch, padding included
    max_length=64,  # larger graphs do not train
    num_shapes=1,  # each is compiled once
  ),
  model=dict(
    num_layers=3,
    width=64,
    num_heads=4,
    feed_forward=128,
    sees="all",  # nodes that a node attends to; or neighbours
    reverse_edges="own_label",  # label of reversed edges; or none
    relative_keys=True,  # labels of edges on keys
    relative_values=True,
    tables_per_head=True,
    tables_per_layer=True,
    readout="mean",  # over a graph's nodes; or sum
    norm="pre",  # or post
    embedding_dropout_rate=0.0,
    dropout_rate=0.1,
    attention_dropout_rate=0.0,
    feed_forward_dropout_rate=0.0,
    dtype="float32",  # or bfloat16; parameters stay float32
    implementation="",  # of attention; empty: the fastest; edge_list: large sparse graphs
  ),
  training=dict(label_smoothing=0.0),
)
TASKS = dict(translation=_TRANSLATION, music=_MUSIC, graphs=_GRAPHS)
