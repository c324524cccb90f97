"""Compares position tables of each head and layer with tables shared between them.

  python -m experiments.sweep --config=configs/sharing.py
  python -m experiments.sweep --config=configs/sharing.py:published

Shaw et al. 2018, section 3.3, share tables between heads; their code of the base model does not. On
Multi30k. The argument names a recipe of `configs/multi30k.py`; the default is `brief`.
"""

from configs import multi30k


def get_config(argument: str = ""):
  """Returns the base cell: relative positions, k = 16."""
  return multi30k.get_base("sharing", argument)


def sweep():
  """Yields each row of the table and the values it changes."""
  yield "per head, per layer", {}
  yield "all heads, per layer", {"model.tables_per_head": False}
  yield "per head, all layers", {"model.tables_per_layer": False}
  yield (
    "all heads, all layers",
    {"model.tables_per_head": False, "model.tables_per_layer": False},
  )
