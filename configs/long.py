r"""Trains a decoder on performances of 131,072 events, sharded over sixteen chips.

  python -m experiments.plan --config=configs/long.py --topology=v5e:4x4

`plan` estimates memory and time per chip before you rent one. Parameters are
replicated. Each chip computes the queries and logits of its 8,192 tokens. In each layer
it gathers the keys and values of the full sequence. With more chips, raise the batch:
--config.batches.tokens=2097152 for v5e:16x16.

A million events on 256 chips need a ring, because gathered keys do not fit into memory:

  python -m experiments.plan --config=configs/long.py --topology=v5e:16x16 \
    --effort=least --config.mesh.sequence=256 --config.mesh.ring=True \
    --config.batches.tokens=1048576 --config.batches.max_length=1048576
"""

from configs import default


def get_config():
  """Returns the config of four layers of the paper's base width, without dropout."""
  config = default.get_config("music")
  config.name = "long"
  config.data.source = "midi"
  config.batches.update(tokens=131_072, max_length=131_072, num_shapes=1)
  config.mesh.sequence = 16
  config.model.update(default.NO_DROPOUT, num_layers=4, dtype="bfloat16")
  return config
