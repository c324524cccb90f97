"""Repeats Table 1 of Shaw et al. 2018 on Multi30k: relative, sinusoidal, both, none.

python -m experiments.sweep --config=configs/table1.py
python -m experiments.sweep --config=configs/table1.py:published,prepared

For `published` and `prepared`, see multi30k.py.
"""

from configs import multi30k


def get_config(argument: str = ""):
  return multi30k.get_base("table1", argument)


def sweep():
  for positions in ("relative", "sinusoidal", "both", "none"):
    yield positions, {"model.positions": positions}
