"""Repeats Table 2 at a small scale: the clipping distance k.

  python -m experiments.sweep --config=configs/table2.py
  python -m experiments.sweep --config=configs/table2.py:published

Shaw et al. 2018, section 4.3, on Multi30k. With k = 0 all positions look alike. The argument names
a recipe of `configs/multi30k.py`; the default is `brief`.
"""

from configs import multi30k


def get_config(argument: str = ""):
  """Returns the base cell: relative positions, k = 16."""
  return multi30k.get_base("table2", argument)


def sweep():
  """Yields each row of the table and the values it changes."""
  for k in (0, 1, 2, 4, 16, 64):
    yield f"k={k}", {"model.max_distance": k}
