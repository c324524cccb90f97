"""Trains a small Transformer, English to German, in four minutes on two cores.

  python -m experiments.train --config=configs/quickstart.py

The corpus is embedded: nothing is downloaded. Expect about 90 BLEU on `test`, and 40 on
`long`, which has longer sentences than training. Then translate lines of your own:

  python -m experiments.translate --workdir=runs/quickstart
"""

from configs import default


def get_config():
  """Returns the config of the smallest run that gives a useful translator."""
  config = default.get_config()
  config.name = "quickstart"
  config.vocabulary.size = 6_000
  config.batches.update(tokens=1024, max_length=64, num_shapes=4)
  config.model.update(num_layers=2, width=128, num_heads=4, feed_forward=256)
  # With so few updates, dropout does more harm than good.
  config.model.update(default.NO_DROPOUT)
  config.training.update(schedule="inverse_sqrt", learning_rate=0.004, warmup_steps=300)
  config.training.update(
    num_steps=2_000, eval_every=500, save_every=500, keep_checkpoints=3
  )
  return config
