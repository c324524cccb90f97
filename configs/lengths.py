"""Trains on short sentences and scores longer ones.

  python -m experiments.sweep --config=configs/lengths.py
  python -m experiments.sweep --config=configs/lengths.py:published
  python -m experiments.sweep --config=configs/lengths.py:embedded

Trains on Multi30k's pairs of at most 15 tokens per side (`max_length` counts the end mark) and
scores the full test split. With our vocabulary, 18,053 of 29,000 pairs train, and 346 of 1,000
test pairs are longer; with the published one, 18,516 and 329. `embedded` is the quickstart with
pairs of at most 27 tokens: 18,096 of 20,000. Longer are 45 of 500 test pairs and all 200 of the
split `long`. Other arguments are recipes of `configs/multi30k.py`.
"""

from configs import multi30k, quickstart


def get_config(argument: str = ""):
  if argument == "embedded":
    config = quickstart.get_config()
    config.name = "lengths-embedded"
    config.batches.max_length = 28
    # Those of the quickstart when the results were computed.
    config.vocabulary.size = 2_000
    config.model.update(embedding_dropout_rate=0.1, dropout_rate=0.1)
    config.training.num_steps = 1_500
    return config
  config = multi30k.get_base("lengths", argument)
  config.batches.max_length = 16
  return config


def sweep():
  for k in (4, 16):
    yield f"relative, k={k}", {"model.max_distance": k}
  for positions in ("sinusoidal", "none"):
    yield positions, {"model.positions": positions}
