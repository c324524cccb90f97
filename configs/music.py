r"""Models Bach's chorales with a decoder: Music Transformer (Huang et al. 2018).

  python -m experiments.train --config=configs/music.py --workdir=runs/music
  python -m experiments.train --config=configs/music.py:sinusoidal,published --workdir=runs/sin
  python -m experiments.sweep --config=configs/music.py --seeds=3
  python -m experiments.sweep --config=configs/music.py:long --only=relative
  python -m experiments.sample --workdir=runs/music --prime=mine.mid --out=more.mid
  python -m experiments.train --config=configs/music.py --config.data.source=midi \
      --config.data.midi.path=FOLDER --workdir=runs/mine  # with sub-folders train and valid

Arguments, separated by commas: positions and a recipe. Positions: `relative`, per-head tables on
keys, zero beyond the last distance, with sinusoids; `clipped`, on keys and values up to distance
16, as in Shaw et al. 2018; `sinusoidal`; `none`. Recipes: `brief`, a small model for CPUs (`sweep
--parallel=4` makes the best use of four cores); `long`, 8,000 updates of it in place of 3,000;
`published`, the baseline's 5 layers of width 256, for an accelerator. All transpose by up to 5
semitones and average the last checkpoints.

The data are the JSB chorales on a grid of 16th notes, the four voices of a step in turn, with the
published splits. For a local file give --config.data.chorales.path=FOLDER.
"""

from configs import default

_POSITIONS = {
  "relative": dict(positions="both", relative_values=False, beyond="zero"),
  "clipped": dict(
    positions="relative", relative_values=True, beyond="clip", max_distance=16
  ),
  "sinusoidal": dict(positions="sinusoidal"),
  "none": dict(positions="none"),
}
_BRIEF = dict(
  mesh=dict(data=1),
  batches=dict(tokens=2304),
  model=dict(
    **dict(num_layers=3, width=128, num_heads=4, feed_forward=512, max_distance=256),
    **dict(default.NO_DROPOUT, implementation="chunked"),
  ),
  training=dict(learning_rate=0.004, warmup_steps=400, num_steps=3000, save_every=50),
)
_PUBLISHED = dict(
  batches=dict(tokens=16_896),
  model=dict(
    **dict(num_layers=5, width=256, num_heads=8, feed_forward=1024, max_distance=1024),
    **dict(embedding_dropout_rate=0.2, dropout_rate=0.2),
  ),
  training=dict(learning_rate=0.001, warmup_steps=1000, num_steps=6000, save_every=100),
)
_LONG = _BRIEF | dict(training=_BRIEF["training"] | dict(num_steps=8000))
_RECIPES = dict(brief=_BRIEF, long=_LONG, published=_PUBLISHED)


def get_config(argument: str = ""):
  """Returns a config by positions and recipe; by default relative and brief."""
  positions, recipe = default.choose(argument, _POSITIONS, _RECIPES)
  config = default.get_config("music")
  config.name = f"music-{argument}".replace(",", "-").strip("-")
  config.data.transpose = 5
  # The rows of a batch hold the longest training piece and its end: no piece is sliced.
  config.batches.update(max_length=2112, num_shapes=5)
  config.training.update(schedule="inverse_sqrt", eval_every=500, keep_checkpoints=8)
  config.decoding.average_checkpoints = 8
  config.update(_RECIPES[recipe])
  config.model.update(_POSITIONS[positions])
  return config


def sweep():
  for name, changes in _POSITIONS.items():
    # The first is the base cell.
    yield name, {f"model.{key}": x for key, x in changes.items() if name != "relative"}
