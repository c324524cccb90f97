"""Bach's chorales by a decoder alone: Music Transformer (Huang et al. 2018), and its rivals.

  python -m experiments.train --config=configs/music.py --workdir=runs/music
  python -m experiments.train --config=configs/music.py:sinusoidal --workdir=runs/sinusoidal
  python -m experiments.sweep --config=configs/music.py --seeds=3
  python -m experiments.sample --workdir=runs/music --prime=mine.mid --out=more.mid
  python -m experiments.train --config=configs/music.py --config.data.source=midi \
      --config.data.midi.path=FOLDER --workdir=runs/mine

The argument is one of: relative, per-head tables of the distances up to half the longest piece on
keys, zero beyond, and sinusoids; clipped, keys and values of distances up to 16, as of Shaw et al.
2018, without sinusoids; sinusoidal; none.

JSB chorales on a grid of 16th notes, the four voices of a step one after the other; split as
published. --config.data.chorales.path=FOLDER names a file at hand.
"""

from configs import default

_POSITIONS = {
  "relative": dict(positions="both", relative_values=False, beyond="zero", max_distance=1024),
  "clipped": dict(positions="relative", relative_values=True, beyond="clip", max_distance=16),
  "sinusoidal": dict(positions="sinusoidal"),
  "none": dict(positions="none"),
}


def get_config(argument: str = "relative"):
  """The published baseline's size (5 layers of width 256), with positions by name."""
  if argument not in _POSITIONS:
    raise ValueError(f"unknown argument {argument!r}: use one of {', '.join(_POSITIONS)}")
  config = default.get_config("music")
  config.name = f"music-{argument}"
  config.model.update(num_layers=5, width=256, num_heads=8, feed_forward=1024)
  config.model.update(_POSITIONS[argument])
  config.model.update(dict.fromkeys(("embedding_dropout_rate", "dropout_rate"), 0.2))
  config.training.update(num_steps=3000, schedule="inverse_sqrt", learning_rate=0.001)
  config.training.update(warmup_steps=300, eval_every=250, save_every=250, keep_checkpoints=3)
  return config


def sweep():
  """Each kind of positions."""
  for name, changes in _POSITIONS.items():
    yield name, {f"model.{key}": value for key, value in changes.items()}
