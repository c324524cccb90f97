r"""Models Bach's chorales with a decoder: Music Transformer (Huang et al. 2018).

  python -m experiments.train --config=configs/music.py --workdir=runs/music
  python -m experiments.train --config=configs/music.py:sinusoidal,published --workdir=runs/sin
  python -m experiments.sweep --config=configs/music.py --seeds=3
  python -m experiments.sample --workdir=runs/music --prime=mine.mid --out=more.mid
  python -m experiments.train --config=configs/music.py --config.data.source=midi \
      --config.data.midi.path=FOLDER --workdir=runs/mine  # with sub-folders train and valid

Arguments, separated by commas: positions and a recipe. Positions: `relative`, per-head tables on
keys, zero beyond the last distance, with sinusoids; `clipped`, on keys and values up to distance
16, as in Shaw et al. 2018; `sinusoidal`; `none`. Recipes: `brief`, a small model for CPUs (`sweep
--parallel=4` makes the best use of four cores); `published`, the baseline's 5 layers of width 256,
for an accelerator. Both transpose by up to 5 semitones and average the last checkpoints.

The data are the JSB chorales on a grid of 16th notes, the four voices of a step in turn, with the
published splits. For a local file give --config.data.chorales.path=FOLDER.
"""

from configs import default

_POSITIONS = {
  "relative": dict(positions="both", relative_values=False, beyond="zero"),
  "clipped": dict(positions="relative", relative_values=True, beyond="clip", max_distance=16),
  "sinusoidal": dict(positions="sinusoidal"),
  "none": dict(positions="none"),
}
# The rows of a batch hold the longest training piece and its end: no piece is sliced.
_RECIPES = {
  "brief": dict(
    **dict(layers=3, width=128, heads=4, feed_forward=512, max_distance=256),
    **dict(dropout=0.0, inner_dropout=0.0, tokens=2304, devices=1),
    implementation="chunked",
    **dict(learning_rate=0.004, warmup=400, steps=3000, eval_every=500, save_every=50, average=8),
  ),
  "published": dict(
    **dict(layers=5, width=256, heads=8, feed_forward=1024, max_distance=1024),
    **dict(dropout=0.2, inner_dropout=0.1, tokens=16_896, devices=-1),
    implementation="",
    **dict(learning_rate=0.001, warmup=1000, steps=6000, eval_every=500, save_every=100, average=8),
  ),
}
_LONGEST = 2112  # holds every training piece


def get_config(argument: str = ""):
  """Returns a config by positions and recipe; by default relative and brief."""
  words = default.words_of(argument, *_POSITIONS, *_RECIPES)
  recipe = _RECIPES[default.the_only(words, _RECIPES, "brief")]
  config = default.get_config("music")
  config.name = "-".join(["music", *words])
  config.mesh.data = recipe["devices"]
  config.data.transpose = 5
  config.batches.update(tokens=recipe["tokens"], max_length=_LONGEST, num_shapes=5)
  same = ("width", "feed_forward", "max_distance", "implementation")
  config.model.update({key: recipe[key] for key in same})
  config.model.update(
    num_layers=recipe["layers"],
    num_heads=recipe["heads"],
    embedding_dropout_rate=recipe["dropout"],
    dropout_rate=recipe["dropout"],
    attention_dropout_rate=recipe["inner_dropout"],
    feed_forward_dropout_rate=recipe["inner_dropout"],
  )
  config.model.update(_POSITIONS[default.the_only(words, _POSITIONS, "relative")])
  same = ("learning_rate", "eval_every", "save_every")
  config.training.update(schedule="inverse_sqrt", **{key: recipe[key] for key in same})
  config.training.update(num_steps=recipe["steps"], warmup_steps=recipe["warmup"])
  config.training.keep_checkpoints = recipe["average"]
  config.decoding.average_checkpoints = recipe["average"]
  return config


def sweep():
  """Yields each kind of positions and its changes; the first is the base cell."""
  for name, changes in _POSITIONS.items():
    is_base = name == "relative"
    yield name, {} if is_base else {f"model.{key}": value for key, value in changes.items()}
