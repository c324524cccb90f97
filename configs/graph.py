"""Attention over labelled graphs (Shaw et al. 2018, section 3.1): kinship chains, and molecules.

  python -m experiments.train --config=configs/graph.py:clutrr
  python -m experiments.sweep --config=configs/graph.py:clutrr --seeds=3
  python -m experiments.sweep --config=configs/graph.py:tu --seeds=10
  python -m experiments.train --config=configs/graph.py:tu,values --config.data.tu.fold=3
  python -m experiments.train --config=configs/graph.py:tu --workdir=runs/mine \
      --config.data.tu.path=FOLDER --config.data.tu.name=""

The argument's words: clutrr, trained on chains of 2 to 4 relations and scored on 2 to 10; or tu,
molecules and any folder in TU format, where seeds 0 to 9 test on one of ten folds each
(--config.data.tu.fold=3 fixes it). And a system:

  keys_values   labels of edges on keys and values; every node sees all of its graph
  keys, values  labels on the one alone
  none          neighbours see each other, and no labels
  undirected    keys_values, and an edge is the same in both directions
  unstructured  every node sees all of its graph, and nothing of its edges
"""

from configs import default

_BLIND = dict(relative_keys=False, relative_values=False)
_SYSTEMS = {
  "keys_values": {},
  "keys": dict(relative_values=False),
  "values": dict(relative_keys=False),
  "none": dict(_BLIND, sees="neighbours"),
  "undirected": dict(reverse_edges="same_label"),
  "unstructured": _BLIND,
}
_ROWS = dict(keys_values="keys and values")  # other rows are called like their systems
_SOURCES = ("clutrr", "tu")


def get_config(argument: str = "clutrr"):
  """A source and a system, separated by a comma."""
  source, _, system = argument.partition(",")
  system = system or "keys_values"
  if source not in _SOURCES or system not in _SYSTEMS:
    raise ValueError(
      f"unknown argument {argument!r}: use {' or '.join(_SOURCES)}, and one of "
      f"{', '.join(_SYSTEMS)}, as in clutrr,keys"
    )
  config = default.get_config("graphs")
  config.name = f"graph-{source}" + (f"-{system}" if system != "keys_values" else "")
  config.data.source = source
  config.model.update(_SYSTEMS[system])
  config.training.update(schedule="inverse_sqrt", learning_rate=0.001, keep_checkpoints=3)
  (_clutrr if source == "clutrr" else _tu)(config)
  return config


def _clutrr(config) -> None:
  """128 chains a batch, about ten epochs; chosen on the valid split."""
  config.batches.update(tokens=640, max_length=5, num_shapes=1)
  config.training.update(num_steps=1030, warmup_steps=200, eval_every=206, save_every=206)


def _tu(config) -> None:
  """Chosen on the valid folds of MUTAG."""
  config.batches.update(tokens=1024, max_length=512, num_shapes=2)
  config.model.reverse_edges = "none"  # a bond is an edge in each direction already
  config.training.update(num_steps=240, warmup_steps=40, eval_every=40, save_every=40)


def sweep():
  """Each system."""
  for name, changes in _SYSTEMS.items():
    yield _ROWS.get(name, name), {f"model.{key}": value for key, value in changes.items()}
