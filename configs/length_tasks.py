"""Trains on inputs of up to 40 symbols and scores inputs of 41 to 500, in five tasks.

  python -m experiments.sweep --config=configs/length_tasks.py:missing_duplicate
  python -m experiments.sweep --config=configs/length_tasks.py:reverse_string
  python -m experiments.train --config=configs/length_tasks.py:reverse_string,xl,random

The tasks are generated; they are five of the fifteen of Ruoss et al. 2023:
missing_duplicate, modular_arithmetic, reverse_string, bucket_sort and
stack_manipulation. As in that paper, the encoder has five post-norm layers of width 64
with eight heads, and Adam has a constant learning rate of 0.001. `random` draws the
positions of each batch from 0 to 2,047, in training and in tests.

The sweep trains each position scheme twice, with plain and with random positions. It
begins with the four schemes of Ruoss et al. At the end it trains Shaw's scheme with
other initial tables.
"""

from configs import default

TASKS = (
  "missing_duplicate",
  "modular_arithmetic",
  "reverse_string",
  "bucket_sort",
  "stack_manipulation",
)
RANGE = 2048
LONGEST = 1001  # tokens of the longest test: 500 input symbols and 501 blanks
_MODULE = "experiments.length_tasks.model"
# For each scheme, the value of `positions`, and the distance that its tables reach.
# With random positions, tables reach all distances. If they were clipped at 16, most
# pairs would have the two outermost rows.
SCHEMES = dict(
  sinusoidal=("sinusoidal", 0),
  xl=("xl", LONGEST),
  alibi=(f"{_MODULE}:Alibi", 0),
  rotary=("rotary", 0),
  relative=("relative", 16),
  content=("content", 128),
  deberta=("deberta", 128),
  fire=(f"{_MODULE}:Fire", 20),
  kerple=(f"{_MODULE}:Kerple", 0),
)
_TABLES = ("xl", "relative", "content", "deberta")


def get_config(argument: str = ""):
  """Returns the config of a task and a scheme, with plain or random positions."""
  task, scheme, positions = default.choose(
    argument, TASKS, SCHEMES, ("plain", "random")
  )
  config = default.get_config("length_tasks")
  config.name = f"tasks-{task}"
  config.data.source = task
  config.model.update(default.NO_DROPOUT)
  config.model.update(
    num_layers=5, width=64, num_heads=8, feed_forward=256, norm="post", dropout_rate=0.1
  )
  config.training.update(
    num_steps=10_000,
    learning_rate=0.001,
    warmup_steps=1,
    eval_every=1000,
    save_every=250,
    keep_checkpoints=1,
    # On a CPU, what 16 rows need stays in the cache. 128 rows at once take longer.
    num_microbatches=8,
  )
  changes = choose(scheme, positions == "random")
  config.update_from_flattened_dict(changes)
  return config


def choose(scheme: str, is_random: bool) -> dict[str, object]:
  """Returns a scheme's config values, by dotted key, with plain or random positions.

  `scheme` is a key of `SCHEMES`.
  """
  positions, reach = SCHEMES[scheme]
  changes: dict[str, object] = {"model.positions": positions}
  if reach:
    changes["model.max_distance"] = reach
  # The authors' code applies dropout to embeddings only if it adds sinusoids to them.
  changes["model.embedding_dropout_rate"] = 0.1 if scheme == "sinusoidal" else 0.0
  if scheme in _TABLES:
    # Gathers rows once for all sequences, which share the positions. At 80 tokens it
    # takes half as long as `projected` with Shaw's tables of any size.
    changes["model.implementation"] = "per_position"
  if not is_random:
    return changes
  changes["model.random_positions"] = RANGE
  if scheme in _TABLES:
    changes["model.max_distance"] = RANGE - 1
  if scheme == "fire":
    changes["model.max_distance"] = RANGE // 4
  return changes


def sweep():
  for scheme in SCHEMES:
    yield scheme, choose(scheme, is_random=False)
    yield f"{scheme}, random", choose(scheme, is_random=True)
  for stddev in (0.1, 1.0):
    for is_random in (False, True):
      name = f"relative, tables {stddev:g}" + (", random" if is_random else "")
      yield name, choose("relative", is_random) | {"model.table_stddev": stddev}
