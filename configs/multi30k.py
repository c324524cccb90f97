"""Translates image captions from English to German with a small Transformer.

  python -m experiments.train --config=configs/multi30k.py --workdir=runs/multi30k
  python -m experiments.train --config=configs/multi30k.py:sinusoidal --workdir=runs/sinusoidal
  python -m experiments.train --config=configs/multi30k.py:sinusoidal,published,prepared

Multi30k (Elliott et al. 2016). Arguments, separated by commas: positions (relative, sinusoidal,
both, none), a recipe, `prepared`. Recipes: `short` trains in minutes on four CPU cores; `brief`,
for sweeps, takes a fifth of the updates, with pre-norm and without dropout; `published`, for an
accelerator, is that of the published baseline (GitHub LividWo/Revisit-MMT: 41.02 BLEU with
sinusoids) and averages the checkpoints of the last 10 epochs. The baseline's 2,568,192 parameters
are 6,144 more than ours: it has biases in the attention projections.

`prepared` uses that repository's text and vocabulary (9,712 entries) instead of the captions: Moses
tokens, lower case, BPE. For local files give --config.data.multi30k.path=FOLDER.
"""

from configs import default

_POSITIONS = ("relative", "sinusoidal", "both", "none")
_RECIPES = {
  "brief": dict(
    **dict(tokens=1024, dropout=0.0, learning_rate=0.004, warmup=300, steps=1000),
    **dict(norm="pre", average=5, eval_every=250, save_every=50),
  ),
  "short": dict(
    **dict(tokens=1024, dropout=0.1, learning_rate=0.004, warmup=1000, steps=5000),
    **dict(norm="post", average=5, eval_every=500, save_every=250),
  ),
  "published": dict(
    **dict(tokens=8192, dropout=0.3, learning_rate=0.005, warmup=2000, steps=8000),
    **dict(norm="post", average=10, eval_every=500, save_every=64),  # an epoch
  ),
}


def get_config(argument: str = ""):
  """Returns a config by positions, recipe and text; by default relative, short and captions."""
  words = default.words_of(argument, *_POSITIONS, *_RECIPES, "prepared")
  recipe = _RECIPES[default.the_only(words, _RECIPES, "short")]
  config = default.get_config()
  config.name = "-".join(["multi30k", *words])
  config.data.update(source="multi30k", moses=True, lowercase=True)
  config.vocabulary.size = 10_000
  config.batches.update(tokens=recipe["tokens"], max_length=64, num_shapes=6)
  config.model.update(
    num_layers=4,
    width=128,
    num_heads=4,
    feed_forward=256,
    positions=default.the_only(words, _POSITIONS, "relative"),
    norm=recipe["norm"],
    embedding_dropout_rate=recipe["dropout"],
    dropout_rate=recipe["dropout"],
    attention_dropout_rate=0.0,
    feed_forward_dropout_rate=0.0,
  )
  same = ("learning_rate", "eval_every", "save_every")
  config.training.update(schedule="inverse_sqrt", **{key: recipe[key] for key in same})
  config.training.update(num_steps=recipe["steps"], warmup_steps=recipe["warmup"])
  config.training.keep_checkpoints = recipe["average"]
  config.decoding.update(beam_size=5, average_checkpoints=recipe["average"])
  config.evaluation.tokenize = "none"
  if "prepared" in words:
    config.data.update(moses=False, lowercase=False)
    config.data.multi30k.prepared = True
    config.vocabulary.kind = "words"
    config.evaluation.subword_mark = "@@"
  return config


def get_base(name: str, argument: str = ""):
  """Returns the base cell of a sweep: `brief`, unless the argument names another recipe."""
  words = [word for word in argument.split(",") if word]
  config = get_config(",".join([*words, *["brief"] * (not {*words} & {*_RECIPES})]))
  config.name = "-".join([name, *argument.split(",")]).strip("-")
  return config
