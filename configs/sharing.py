"""Compares tables per head and layer with tables that heads or layers share.

  python -m experiments.sweep --config=configs/sharing.py
  python -m experiments.sweep --config=configs/sharing.py:published  # see multi30k.py

Shaw et al. 2018, section 3.3, share tables between heads; their code for the base model
does not. The sweep trains on Multi30k.
"""

from configs import multi30k


def get_config(argument: str = ""):
  return multi30k.get_base("sharing", argument)


def sweep():
  yield "per head, per layer", {}
  yield "all heads, per layer", {"model.tables_per_head": False}
  yield "per head, all layers", {"model.tables_per_layer": False}
  yield (
    "all heads, all layers",
    {"model.tables_per_head": False, "model.tables_per_layer": False},
  )
