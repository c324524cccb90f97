"""Repeats Table 1 at a small scale: relative positions, sinusoids, both, none.

  python -m experiments.sweep --config=configs/table1.py
  python -m experiments.sweep --config=configs/table1.py:published

Shaw et al. 2018, section 4.2, on Multi30k. The argument names a recipe of `configs/multi30k.py`;
the default is `brief`.
"""

from configs import multi30k


def get_config(argument: str = ""):
  """Returns the base cell: relative positions, k = 16."""
  return multi30k.get_base("table1", argument)


def sweep():
  """Yields each row of the table and the values it changes."""
  for positions in ("relative", "sinusoidal", "both", "none"):
    yield positions, {"model.positions": positions}
