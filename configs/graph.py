r"""Classifies labelled graphs (Shaw et al. 2018, section 3.1): kinship, molecules.

  python -m experiments.train --config=configs/graph.py:clutrr
  python -m experiments.sweep --config=configs/graph.py:clutrr --seeds=5
  python -m experiments.sweep --config=configs/graph.py:tu --seeds=10
  python -m experiments.sweep --config=configs/graph.py:mutagenicity --seeds=10
  python -m experiments.train --config=configs/graph.py:tu,values \
      --config.data.tu.fold=3
  python -m experiments.train --config=configs/graph.py:tu --workdir=runs/mine \
      --config.data.tu.path=FOLDER --config.data.tu.name=""

Arguments are a source and a use of the labels of edges, separated by commas. Sources:

- `clutrr`: kinship. Trains on chains of 2 to 4 relations, scores chains of 2 to 10.
- `tu`: the molecules MUTAG, or a folder in TU format. There are ten folds, and each of
  the seeds 0 to 9 tests on a different one.
- `mutagenicity`: more molecules.

Labels are used on keys and values (`keys_values`), on one of them (`keys`, `values`) or
not at all (`none`): a node then attends to its neighbours. With `unstructured`, nodes
attend to all nodes.

In a folder, NAME_node_attributes.txt and NAME_edge_attributes.txt are optional. They
hold features of nodes and edges, in addition to labels. Scale the features first.
Without labels of edges, their features are ignored, too.
"""

from configs import default

_BLIND = dict(relative_keys=False, relative_values=False)
_LABELS = {
  "keys_values": {},  # labels of edges on keys and values
  "keys": dict(relative_values=False),
  "values": dict(relative_keys=False),
  "none": dict(_BLIND, sees="neighbours"),  # attention to neighbours, without labels
  "unstructured": dict(_BLIND, sees="all"),  # ignores edges
}
# 128 chains a batch and about ten epochs, chosen on the validation split.
_CLUTRR = dict(
  batches=dict(tokens=640, max_length=5, num_shapes=1),
  training=dict(num_steps=1030, warmup_steps=200, eval_every=206, save_every=206),
)
# 40 epochs, after which MUTAG's validation loss only rises: 120 to 160 updates,
# depending on the fold. No reverse edges: in the files a bond is two edges already.
_TU = dict(
  data=dict(source="tu"),
  batches=dict(tokens=1024, max_length=128, num_shapes=1),
  model=dict(sees="neighbours", reverse_edges="none", dropout_rate=0.2),
  training=dict(
    num_steps=0, num_epochs=40, warmup_steps=40, eval_every=40, save_every=40
  ),
)
# 20 epochs, about 2,320 updates: after ten the validation loss still falls.
_MUTAGENICITY = dict(
  data=dict(tu=dict(name="Mutagenicity")),
  batches=dict(num_shapes=4),
  training=dict(num_epochs=20, warmup_steps=120, eval_every=300, save_every=300),
)
_SOURCES = dict(clutrr=(_CLUTRR,), tu=(_TU,), mutagenicity=(_TU, _MUTAGENICITY))


def get_config(argument: str = ""):
  source, labels = default.choose(argument, _SOURCES, _LABELS)
  config = default.get_config("graphs")
  config.name = f"graph-{source}" + (f"-{labels}" if labels != "keys_values" else "")
  config.training.update(
    schedule="inverse_sqrt", learning_rate=0.001, keep_checkpoints=3
  )
  for values in _SOURCES[source]:
    config.update(values)
  config.model.update(_LABELS[labels])
  return config


def sweep():
  for name, changes in _LABELS.items():
    yield name.replace("_", " and "), {f"model.{key}": x for key, x in changes.items()}
