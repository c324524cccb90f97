"""Shared tables: each head's own or those of all heads, a layer's own or those of all.

  python -m experiments.sweep --config=configs/sharing.py
  python -m experiments.sweep --config=configs/sharing.py:published

Shaw et al. 2018, section 3.3, share them by heads, and their code of the base model does not. On
Multi30k; the recipes are those of `configs/multi30k.py`: `brief`, or the one named.
"""

from configs import multi30k


def get_config(argument: str = ""):
  """The base cell: relative positions, k = 16."""
  return multi30k.get_base("sharing", argument)


def sweep():
  """Each row of the table, and the values it changes."""
  yield "per head, per layer", {}
  yield "all heads, per layer", {"model.tables_per_head": False}
  yield "per head, all layers", {"model.tables_per_layer": False}
  yield (
    "all heads, all layers",
    {"model.tables_per_head": False, "model.tables_per_layer": False},
  )
