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

from typing import NamedTuple

from configs import default

RANGE = 2048
LONGEST = 1001  # tokens of the longest test: 500 input symbols and 501 blanks
_MODULE = "experiments.length_tasks.model"


class Scheme(NamedTuple):
  """Describes a scheme by values of `config.model`.

  `reach` is `max_distance` for plain positions, and `random_reach` for random ones. A
  reach of 0 leaves the default, which the scheme does not use.
  """

  positions: str
  reach: int = 0
  random_reach: int = 0


# With random positions, tables reach all distances. If they were clipped at 16, most
# pairs would have the two outermost rows.
SCHEMES = dict(
  sinusoidal=Scheme("sinusoidal"),
  xl=Scheme("xl", LONGEST, RANGE - 1),
  alibi=Scheme(f"{_MODULE}:Alibi"),
  rotary=Scheme("rotary"),
  relative=Scheme("relative", 16, RANGE - 1),
  content=Scheme("content", 128, RANGE - 1),
  deberta=Scheme("deberta", 128, RANGE - 1),
  # FIRE's is a threshold: the paper's for random positions.
  fire=Scheme(f"{_MODULE}:Fire", 20, 512),
  kerple=Scheme(f"{_MODULE}:Kerple"),
)
_TABLES = ("xl", "relative", "content", "deberta")


def get_config(argument: str = ""):
  """Returns the config of a task and a scheme, with plain or random positions."""
  task, scheme, positions = default.choose(
    argument, default.LENGTH_TASKS, SCHEMES, ("plain", "random")
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
    warmup_steps=1,  # none, as the rate is constant
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
  positions, reach, random_reach = SCHEMES[scheme]
  changes: dict[str, object] = {"model.positions": positions}
  changes["model.random_positions"] = RANGE if is_random else 0
  if reach:
    changes["model.max_distance"] = random_reach if is_random else reach
  # The authors' code applies dropout to embeddings only if it adds sinusoids to them.
  changes["model.embedding_dropout_rate"] = 0.1 if scheme == "sinusoidal" else 0.0
  if scheme in _TABLES:
    # It gathers rows once for all sequences, which share the positions. `projected`
    # multiplies the queries by all rows, and random positions have 4,095.
    changes["model.implementation"] = "per_position"
  return changes


def sweep():
  for scheme in SCHEMES:
    yield scheme, choose(scheme, is_random=False)
    yield f"{scheme}, random", choose(scheme, is_random=True)
  for stddev in (0.1, 1.0):
    for is_random in (False, True):
      name = f"relative, tables {stddev:g}" + (", random" if is_random else "")
      yield name, choose("relative", is_random) | {"model.table_stddev": stddev}
