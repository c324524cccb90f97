"""Bach's chorales by a decoder alone: Music Transformer (Huang et al. 2018), and its rivals.

  python -m experiments.train --config=configs/music.py --workdir=runs/music
  python -m experiments.train --config=configs/music.py:sinusoidal,published --workdir=runs/sin
  python -m experiments.sweep --config=configs/music.py --seeds=3
  python -m experiments.sample --workdir=runs/music --prime=mine.mid --out=more.mid
  python -m experiments.train --config=configs/music.py --config.data.source=midi \
      --config.data.midi.path=FOLDER --workdir=runs/mine

Arguments, separated by commas: positions and a recipe. Positions are one of: relative, per-head
tables of the distances up to half the longest row on keys, zero beyond, and sinusoids; clipped,
keys and values of distances up to 16, as of Shaw et al. 2018, without sinusoids; sinusoidal; none.

Recipes: `brief`, half an hour on four CPU cores: a small model, rows of 512 tokens, cut anew in
each epoch. `published`, the baseline's 5 layers of width 256 on whole pieces, for an accelerator.
In both each epoch transposes each piece. Chosen on the valid split.

JSB chorales on a grid of 16th notes, the four voices of a step one after the other; split as
published. --config.data.chorales.path=FOLDER names a file at hand.
"""

from configs import default

_POSITIONS = {
  "relative": dict(positions="both", relative_values=False, beyond="zero"),
  "clipped": dict(positions="relative", relative_values=True, beyond="clip", max_distance=16),
  "sinusoidal": dict(positions="sinusoidal"),
  "none": dict(positions="none"),
}
_RECIPES = {
  "brief": dict(
    **dict(layers=3, width=128, heads=4, feed_forward=512, dropout=0.1, attention_dropout=0.0),
    **dict(tokens=2048, max_length=512, learning_rate=0.003, warmup=200, steps=6000),
    **dict(eval_every=250),
  ),
  "published": dict(
    **dict(layers=5, width=256, heads=8, feed_forward=1024, dropout=0.2, attention_dropout=0.1),
    **dict(tokens=8192, max_length=2048, learning_rate=0.001, warmup=1000, steps=10_000),
    **dict(eval_every=500),
  ),
}


def get_config(argument: str = ""):
  """Positions and recipe by name; relative and brief by default."""
  words = [word for word in argument.split(",") if word]
  for word in words:
    if word not in (known := (*_POSITIONS, *_RECIPES)):
      raise ValueError(f"unknown argument {word!r}: use {', '.join(known)}")
  recipe = _RECIPES[_the_only(words, _RECIPES, "brief")]
  config = default.get_config("music")
  config.name = "-".join(["music", *words])
  config.data.transpose = 5
  config.batches.update(
    tokens=recipe["tokens"],
    max_length=recipe["max_length"],
    cut_anew=True,
  )
  config.model.update(
    num_layers=recipe["layers"],
    width=recipe["width"],
    num_heads=recipe["heads"],
    feed_forward=recipe["feed_forward"],
    max_distance=recipe["max_length"] // 2,
    embedding_dropout_rate=recipe["dropout"],
    dropout_rate=recipe["dropout"],
    attention_dropout_rate=recipe["attention_dropout"],
    feed_forward_dropout_rate=recipe["attention_dropout"],
  )
  config.model.update(_POSITIONS[_the_only(words, _POSITIONS, "relative")])
  config.training.update(
    num_steps=recipe["steps"],
    schedule="inverse_sqrt",
    learning_rate=recipe["learning_rate"],
    warmup_steps=recipe["warmup"],
    eval_every=recipe["eval_every"],
    save_every=recipe["eval_every"],
    keep_checkpoints=3,
  )
  return config


def sweep():
  """Each kind of positions."""
  for name, changes in _POSITIONS.items():
    yield name, {f"model.{key}": value for key, value in changes.items()}


def _the_only(words, choices, default: str) -> str:
  found = [word for word in words if word in choices]
  if len(found) > 1:
    raise ValueError(f"{' and '.join(found)} exclude each other: give one")
  return found[0] if found else default
