"""Trains on short sentences and scores longer ones.

  python -m experiments.sweep --config=configs/lengths.py
  python -m experiments.sweep --config=configs/lengths.py:published
  python -m experiments.sweep --config=configs/lengths.py:embedded

Trains on Multi30k's pairs of at most 15 tokens per side and scores the whole test split; records
have the length of each sentence. `max_length` is 16 since it counts the end mark. With the
published vocabulary (`bpe10k_en-de`) 18,516 of 29,000 pairs train; 267 of the 1,000 test sources
are longer, and 329 of the test pairs by their longer side. With our own vocabulary: 18,053, 281 and
346.

`embedded` is the quickstart with pairs of at most 27 tokens per side: 18,096 of 20,000. Longer are
45 of 500 test pairs and all 200 of the split `long`, sentences of 31 to 60 words. Other arguments
are recipes of `configs/multi30k.py`.
"""

from configs import multi30k, quickstart

_LONGEST = 15
_LONGEST_EMBEDDED = 27


def get_config(argument: str = ""):
  """Returns the base cell: relative positions, k = 16."""
  if argument == "embedded":
    config = quickstart.get_config()
    config.name = "lengths-embedded"
    config.batches.max_length = _LONGEST_EMBEDDED + 1
    return config
  config = multi30k.get_base("lengths", argument)
  config.batches.max_length = _LONGEST + 1
  return config


def sweep():
  """Yields each curve and the values it changes."""
  for k in (4, 16):
    yield f"relative, k={k}", {"model.max_distance": k}
  for positions in ("sinusoidal", "none"):
    yield positions, {"model.positions": positions}
