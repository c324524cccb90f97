"""Compares tables per head and layer with tables that heads or layers share.

  python -m experiments.sweep --config=configs/sharing.py
  python -m experiments.sweep --config=configs/sharing.py:published

Shaw et al. 2018, section 3.3, share tables between heads; their code for the base model does not.
On Multi30k. The argument names a recipe of `configs/multi30k.py`, by default `brief`.
"""

from configs import multi30k


def get_config(argument: str = ""):
  """Returns the base cell: relative positions, k = 16."""
  return multi30k.get_base("sharing", argument)


def sweep():
  """Yields each row and its changes."""
  heads, layers = {"model.tables_per_head": False}, {"model.tables_per_layer": False}
  yield "per head, per layer", {}
  yield "all heads, per layer", heads
  yield "per head, all layers", layers
  yield "all heads, all layers", heads | layers
