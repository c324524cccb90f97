"""Trains on short sequences and scores longer ones.

  python -m experiments.sweep --config=configs/lengths.py:scan --seeds=5
  python -m experiments.sweep --config=configs/lengths.py:embedded --seeds=5
  python -m experiments.sweep --config=configs/lengths.py --only="relative, k=16"

`scan`, the default, is the length split of SCAN (Lake and Baroni 2018). Outputs have at
most 22 actions in training, and 24 to 48 in the split `test`. `embedded` is the
quickstart with pairs of at most 16 tokens: 16,423 of 20,000. Of the 500 test pairs, 81
are longer (up to 33 tokens). The split `long` has 200 pairs of 36 tokens or more.

Both decode greedily. Each evaluation scores a sample of the test sets. After training,
all test pairs are scored twice: first the model itself ends its translations, then it
is given the length of each reference. For files of SCAN on this machine, give
--config.data.scan.path=FOLDER.
"""

from configs import default, positions, quickstart


def get_config(argument: str = ""):
  """Returns the config with Shaw's positions for a corpus; the default is SCAN."""
  (data,) = default.choose(argument, ("scan", "embedded"))
  config = quickstart.get_config()
  config.name = f"lengths-{data}"
  config.batches.max_length = 17
  if data == "scan":
    config.data.source = "scan"
    config.vocabulary.kind = "words"
    config.evaluation.tokenize = "none"
    config.batches.update(tokens=1024, max_length=23)
    config.model.update(embedding_dropout_rate=0.1, dropout_rate=0.1)
    config.training.update(
      learning_rate=0.002, num_steps=4000, eval_every=500, save_every=500
    )
  else:
    config.training.eval_every = 250
  config.training.update(num_samples=400, score_tests=True)
  config.decoding.beam_size = 1
  config.evaluation.given_lengths = True
  return config


def sweep():
  for k in (16, 4):
    yield f"relative, k={k}", {"model.max_distance": k}
  _, *others = positions.sweep()  # the first is k = 16
  yield from others
  for stack in ("encoder", "decoder"):
    yield f"relative, {stack} only", {"model.positions_in": stack}
    for name in ("sinusoidal", "rotary", "xl"):
      yield f"{name}, {stack} only", dict(others)[name] | {"model.positions_in": stack}
