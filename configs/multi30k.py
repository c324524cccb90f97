r"""Translates image captions from English to German with a small Transformer.

  python -m experiments.train --config=configs/multi30k.py --workdir=runs/multi30k
  python -m experiments.train --config=configs/multi30k.py:sinusoidal \
      --workdir=runs/sinusoidal
  python -m experiments.train --config=configs/multi30k.py:sinusoidal,published,prepared

Multi30k is from Elliott et al. 2016. Arguments, separated by commas, are positions
(relative, sinusoidal, both, none), a version, and `prepared`. The versions are:

- `short`: trains in minutes on four CPU cores.
- `brief`: for sweeps. Takes a fifth of the updates, with pre-norm and without dropout.
- `published`: for an accelerator. Trains as the published baseline (GitHub
  LividWo/Revisit-MMT: 41.02 BLEU with sinusoids), and averages the checkpoints of the
  last 10 epochs. The baseline's 2,568,192 parameters are 6,144 more than ours, because
  its attention projections have biases.

`prepared` uses the text and the vocabulary (9,712 entries) of that repository instead
of the captions: Moses tokens, lower case, BPE. For files on this machine, give
--config.data.multi30k.path=FOLDER.
"""

from configs import default

_POSITIONS = ("relative", "sinusoidal", "both", "none")
_VERSIONS = dict(
  short=dict(),
  brief=dict(
    model=dict(norm="pre", embedding_dropout_rate=0.0, dropout_rate=0.0),
    training=dict(warmup_steps=300, num_steps=1000, eval_every=250, save_every=50),
  ),
  published=dict(
    batches=dict(tokens=8192),
    model=dict(embedding_dropout_rate=0.3, dropout_rate=0.3),
    training=dict(
      learning_rate=0.005,
      warmup_steps=2000,
      num_steps=8000,
      save_every=64,  # an epoch
      keep_checkpoints=10,
    ),
    decoding=dict(average_checkpoints=10),
  ),
)


def get_config(argument: str = ""):
  """Returns the config that the argument describes: positions, version and text.

  The defaults are relative, short and the original captions.
  """
  positions, version, text = default.choose(
    argument, _POSITIONS, _VERSIONS, ("captions", "prepared")
  )
  config = default.get_config()
  config.name = f"multi30k-{argument}".replace(",", "-").strip("-")
  config.data.update(source="multi30k", moses=True, lowercase=True)
  config.vocabulary.size = 10_000
  config.batches.update(tokens=1024, max_length=64, num_shapes=6)
  config.model.update(num_layers=4, width=128, num_heads=4, feed_forward=256)
  config.model.update(positions=positions, norm="post")
  config.model.update(attention_dropout_rate=0.0, feed_forward_dropout_rate=0.0)
  config.training.update(
    schedule="inverse_sqrt", learning_rate=0.004, warmup_steps=1000
  )
  config.training.update(
    num_steps=5000, eval_every=500, save_every=250, keep_checkpoints=5
  )
  config.decoding.update(beam_size=5, average_checkpoints=5)
  config.evaluation.tokenize = "none"
  config.update(_VERSIONS[version])
  if text == "prepared":
    config.data.update(moses=False, lowercase=False)
    config.data.multi30k.prepared = True
    config.vocabulary.kind = "words"
    config.evaluation.subword_mark = "@@"
  return config


def get_base(name: str, argument: str = ""):
  """Returns the base config of the sweep `name`, which its configurations change.

  It is `get_config(argument)`, but the default version is brief.
  """
  has_version = any(word in _VERSIONS for word in argument.split(","))
  config = get_config(argument if has_version else f"{argument},brief")
  config.name = f"{name}-{argument}".replace(",", "-").strip("-")
  return config
