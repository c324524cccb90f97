"""Classifies labelled graphs (Shaw et al. 2018, section 3.1): kinship, molecules.

  python -m experiments.train --config=configs/graph.py:clutrr
  python -m experiments.sweep --config=configs/graph.py:clutrr --seeds=3
  python -m experiments.sweep --config=configs/graph.py:tu --seeds=10
  python -m experiments.train --config=configs/graph.py:tu,values --config.data.tu.fold=3
  python -m experiments.train --config=configs/graph.py:tu --workdir=runs/mine \
      --config.data.tu.path=FOLDER --config.data.tu.name=""

The argument's words, separated by commas: clutrr, trained on chains of 2 to 4 relations and scored
on 2 to 10; or tu, the molecules MUTAG and any folder in TU format, where seeds 0 to 9 test on one
of ten folds each (--config.data.tu.fold=3 fixes it); or mutagenicity, more molecules. And a system:
keys_values, keys, values, none, undirected or unstructured, as `_SYSTEMS` says below.

A folder's NAME_node_attributes.txt and NAME_edge_attributes.txt, where they are there, train beside
the labels, as the numbers are (scale them): those of nodes in every system, those of edges where
labels of edges do.
"""

from configs import default

_BLIND = dict(relative_keys=False, relative_values=False)
# Each: what it is, and the values that make it.
_SYSTEMS = {
  "keys_values": (
    "labels of edges on keys and values; all persons of a chain see each other, atoms see their "
    "neighbours",
    {},
  ),
  "keys": ("the first with labels on keys alone", dict(relative_values=False)),
  "values": ("the first with labels on values alone", dict(relative_keys=False)),
  "none": ("neighbours see each other, and no labels", dict(_BLIND, sees="neighbours")),
  "undirected": (
    "the first, but an edge is the same in both directions",
    dict(reverse_edges="same_label"),
  ),
  "unstructured": (
    "every node sees all of its graph, and nothing of its edges",
    dict(_BLIND, sees="all"),
  ),
}
_ROWS = dict(keys_values="keys and values")  # other rows are called like their systems


def get_config(argument: str = ""):
  """A source and a system by name; clutrr and keys_values by default."""
  words = default.words_of(argument, *_SOURCES, *_SYSTEMS)
  source = default.the_only(words, _SOURCES, "clutrr")
  system = default.the_only(words, _SYSTEMS, "keys_values")
  config = default.get_config("graphs")
  config.name = f"graph-{source}" + (f"-{system}" if system != "keys_values" else "")
  config.training.update(schedule="inverse_sqrt", learning_rate=0.001, keep_checkpoints=3)
  _SOURCES[source](config)
  config.model.update(_SYSTEMS[system][1])
  return config


def _clutrr(config) -> None:
  """128 chains a batch, about ten epochs; chosen on the valid split."""
  config.batches.update(tokens=640, max_length=5, num_shapes=1)
  config.training.update(num_steps=1030, warmup_steps=200, eval_every=206, save_every=206)


def _tu(config) -> None:
  """A bond is an edge in each direction already. After 40 epochs MUTAG's valid loss only rises."""
  config.data.source = "tu"
  config.batches.update(tokens=1024, max_length=128, num_shapes=1)
  config.model.update(sees="neighbours", reverse_edges="none", dropout_rate=0.2)
  config.training.update(num_steps=120, warmup_steps=40, eval_every=40, save_every=40)


def _mutagenicity(config) -> None:
  """About ten epochs."""
  _tu(config)
  config.data.tu.name = "Mutagenicity"
  config.batches.num_shapes = 4
  config.training.update(num_steps=1200, warmup_steps=120, eval_every=300, save_every=300)


_SOURCES = dict(clutrr=_clutrr, tu=_tu, mutagenicity=_mutagenicity)


def sweep():
  """Each system."""
  for name, (_, changes) in _SYSTEMS.items():
    yield _ROWS.get(name, name), {f"model.{key}": value for key, value in changes.items()}
