"""Long performances, 131,072 events at once: a decoder alone, over many chips.

Estimate its memory and time on TPU chips:

  python -m experiments.plan --config=configs/long.py --topology=v5e:4x4

The mesh cuts every sequence into sixteen: each chip embeds its 8,192 tokens, has its queries of all
heads, and computes its logits. In each layer it gathers the keys and values of all, whose gradients
are summed and scattered. Parameters are whole on every chip. With more chips there are more
sequences a batch, which wants as many tokens: --config.batches.tokens=2097152 for v5e:16x16.
Attention is causal: the chip with the last tokens sees twice the keys of the mean.
"""

from configs import default


def get_config():
  """Four layers as wide as the paper's base, no dropout."""
  config = default.get_config("music")
  config.name = "long"
  config.data.source = "midi"
  config.batches.update(tokens=131_072, max_length=131_072, num_shapes=1)
  config.mesh.sequence = 16
  config.model.update(num_layers=4, dtype="bfloat16")
  config.model.update(embedding_dropout_rate=0.0, dropout_rate=0.0)
  config.model.update(attention_dropout_rate=0.0, feed_forward_dropout_rate=0.0)
  return config
