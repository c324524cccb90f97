"""Repeats Table 3 of Shaw et al. 2018 on Multi30k: keys, values, both, neither.

python -m experiments.sweep --config=configs/table3.py
python -m experiments.sweep --config=configs/table3.py:published  # see multi30k.py
"""

from configs import multi30k


def get_config(argument: str = ""):
  return multi30k.get_base("table3", argument)


def sweep():
  yield "keys and values", {}
  yield "keys", {"model.relative_values": False}
  yield "values", {"model.relative_keys": False}
  yield "neither", {"model.positions": "none"}  # the same run as in Table 1
