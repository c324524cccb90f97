"""Compares two rules for distances beyond k: clip to the last row, or add no term.

  python -m experiments.sweep --config=configs/beyond.py
  python -m experiments.sweep --config=configs/beyond.py:published  # see multi30k.py

Shaw et al. 2018 clip; Huang et al. 2018 add no term. The sweep trains on Multi30k. Most
of its sentences have fewer than 16 tokens.
"""

from configs import multi30k


def get_config(argument: str = ""):
  return multi30k.get_base("beyond", argument)


def sweep():
  for k in (4, 16):
    for beyond in ("clip", "zero"):
      yield f"{beyond}, k={k}", {"model.max_distance": k, "model.beyond": beyond}
