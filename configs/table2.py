"""Repeats Table 2 of Shaw et al. 2018 on Multi30k: the clipping distance k.

python -m experiments.sweep --config=configs/table2.py
python -m experiments.sweep --config=configs/table2.py:published  # see multi30k.py
"""

from configs import multi30k


def get_config(argument: str = ""):
  return multi30k.get_base("table2", argument)


def sweep():
  for k in (0, 1, 2, 4, 16, 64, 256):
    yield f"k={k}", {"model.max_distance": k}
