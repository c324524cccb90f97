"""Compares position schemes, to help choose one.

  python -m experiments.sweep --config=configs/positions.py:multi30k
  python -m experiments.sweep --config=configs/positions.py:chorales

`multi30k` is the version `brief` of `configs/multi30k.py`. `chorales` trains two layers
on slices of 512 tokens, and scores whole pieces of about 1,000. Configurations of one
corpus differ only in their positions. `configs/lengths.py` scores the same schemes on
sequences that are longer than in training.
"""

from configs import default, multi30k, music


def get_config(argument: str = ""):
  """Returns the config with Shaw's positions for a corpus; the default is multi30k."""
  (corpus,) = default.choose(argument, ("multi30k", "chorales"))
  if corpus == "multi30k":
    config = multi30k.get_base("positions", "")
  else:
    config = music.get_config("clipped")
    config.batches.update(tokens=2048, max_length=512, num_shapes=2)
    config.model.update(
      num_layers=2, feed_forward=256, max_distance=128, implementation=""
    )
    config.training.update(
      num_steps=1000, warmup_steps=200, eval_every=250, save_every=50
    )
  config.name = f"positions-{corpus}"
  return config


def sweep():
  yield "relative", {}  # Shaw et al. 2018
  for positions in ("both", "sinusoidal", "none", "alibi", "rotary"):
    yield positions, {"model.positions": positions}
  # As in T5: distances up to 128, and biases that layers share.
  yield (
    "t5",
    {
      "model.positions": "t5",
      "model.max_distance": 128,
      "model.tables_per_layer": False,
    },
  )
  for positions in ("xl", "content", "deberta"):
    yield positions, {"model.positions": positions, "model.max_distance": 128}
