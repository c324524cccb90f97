"""Repeats Table 1 of Shaw et al. 2018 on Multi30k: relative, sinusoidal, both, none.

  python -m experiments.sweep --config=configs/table1.py
  python -m experiments.sweep --config=configs/table1.py:published

The argument names a recipe of `configs/multi30k.py`, by default `brief`.
"""

from configs import multi30k


def get_config(argument: str = ""):
  """Returns the base cell: relative positions, k = 16."""
  return multi30k.get_base("table1", argument)


def sweep():
  """Yields each row and its changes."""
  for positions in ("relative", "sinusoidal", "both", "none"):
    yield positions, {"model.positions": positions}
