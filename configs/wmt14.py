r"""Repeats Table 1 of Shaw et al. 2018 on WMT 2014: German and French, base and big.

  python -m experiments.train --config=configs/wmt14.py:base,ende,relative --workdir=DIR
  python -m experiments.train --config=configs/wmt14.py:big,enfr,sinusoidal \
      --workdir=DIR
  python -m experiments.plan --config=configs/wmt14.py:base,ende,relative \
      --topology=v5e:2x4

Arguments, separated by commas, are base or big; ende or enfr; relative or sinusoidal;
v1 or v2. The batch is for eight accelerators with 4,096 tokens each.

The paper does not say which of two versions of the code it used. v1 (September 2017)
has post-norm, dropout on embeddings and sub-layers, 4,000 warmup steps and a
learning-rate factor of 1. v2 (October 2017) has pre-norm, dropout also on attention
weights and after the ReLU, 8,000 warmup steps and a factor of 2. The feed-forward width
of base is 1,024 as printed; the code had 2,048. Big averages its last 20 checkpoints.
In the paper they are 10 minutes apart: 600 updates of one second each (Vaswani et al.
2017, section 5.2).
"""

from configs import default

_CHOICES = ("base", "big"), ("ende", "enfr"), ("relative", "sinusoidal"), ("v1", "v2")


def get_config(argument: str = ""):
  """Returns the paper's config; the defaults are base, ende, relative and v1."""
  size, languages, positions, version = words = default.choose(argument, *_CHOICES)
  config = default.get_config()
  config.name = "-".join(["wmt14", *words])
  config.data.update(source="wmt14", languages=f"en-{languages[2:]}")
  config.batches.update(tokens=8 * 4096, max_length=256, num_shapes=8)
  config.model.update(positions=positions, dtype="bfloat16")
  config.decoding.stop = "bound"
  if size == "big":
    dropout = 0.3 if languages == "ende" else 0.1
    config.model.update(width=1024, num_heads=16, feed_forward=4096, max_distance=8)
    config.model.update(
      tables_per_head=False, embedding_dropout_rate=dropout, dropout_rate=dropout
    )
    config.training.update(num_steps=300_000, save_every=600, keep_checkpoints=20)
    config.decoding.average_checkpoints = 20
  if version == "v1":
    config.model.update(
      norm="post", attention_dropout_rate=0.0, feed_forward_dropout_rate=0.0
    )
  else:
    config.model.update(
      norm="pre", attention_dropout_rate=0.1, feed_forward_dropout_rate=0.1
    )
    config.training.update(learning_rate=2.0, warmup_steps=8000)
  return config
