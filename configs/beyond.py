"""Beyond the table: distances above k have its outermost rows, or no term.

  python -m experiments.sweep --config=configs/beyond.py
  python -m experiments.sweep --config=configs/beyond.py:published

Shaw et al. 2018 clip, Music Transformer (Huang et al. 2018) has no term there. On Multi30k, where
most sentences are shorter than 16 tokens; the recipes are those of `configs/multi30k.py`: `brief`,
or the one named.
"""

from configs import multi30k


def get_config(argument: str = ""):
  """The base cell: relative positions, k = 16, clipped."""
  return multi30k.get_base("beyond", argument)


def sweep():
  """Each row of the table, and the values it changes."""
  for k in (4, 16):
    for beyond in ("clip", "zero"):
      yield f"{beyond}, k={k}", {"model.max_distance": k, "model.beyond": beyond}
