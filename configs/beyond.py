"""Compares two rules for distances beyond k: clip to the last row, or add no term.

  python -m experiments.sweep --config=configs/beyond.py
  python -m experiments.sweep --config=configs/beyond.py:published

Shaw et al. 2018 clip; Huang et al. 2018 add no term. On Multi30k, most sentences of which have
fewer than 16 tokens. The argument names a recipe of `configs/multi30k.py`, by default `brief`.
"""

from configs import multi30k


def get_config(argument: str = ""):
  """Returns the base cell: relative positions, k = 16, clipped."""
  return multi30k.get_base("beyond", argument)


def sweep():
  """Yields each row and its changes."""
  for k in (4, 16):
    for beyond in ("clip", "zero"):
      yield f"{beyond}, k={k}", {"model.max_distance": k, "model.beyond": beyond}
