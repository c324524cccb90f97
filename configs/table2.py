"""Repeats Table 2 of Shaw et al. 2018 on Multi30k: the clipping distance k.

  python -m experiments.sweep --config=configs/table2.py
  python -m experiments.sweep --config=configs/table2.py:published

The argument names a recipe of `configs/multi30k.py`, by default `brief`.
"""

from configs import multi30k


def get_config(argument: str = ""):
  """Returns the base cell: relative positions, k = 16."""
  return multi30k.get_base("table2", argument)


def sweep():
  """Yields each row and its changes; with k = 0, the model cannot tell positions apart."""
  for k in (0, 1, 2, 4, 16, 64):
    yield f"k={k}", {"model.max_distance": k}
