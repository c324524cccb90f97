"""Repeats Table 3 at a small scale: relative positions in keys, values, both, neither.

  python -m experiments.sweep --config=configs/table3.py
  python -m experiments.sweep --config=configs/table3.py:published

Shaw et al. 2018, section 4.3, on Multi30k. "Neither" has no positions at all. The argument names a
recipe of `configs/multi30k.py`; the default is `brief`.
"""

from configs import multi30k


def get_config(argument: str = ""):
  """Returns the base cell: relative positions, k = 16."""
  return multi30k.get_base("table3", argument)


def sweep():
  """Yields each row of the table and the values it changes."""
  yield "keys and values", {}
  yield "keys", {"model.relative_values": False}
  yield "values", {"model.relative_keys": False}
  yield "neither", {"model.positions": "none"}  # the run of Table 1, too
