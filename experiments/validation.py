"""Checks a config before anything is loaded or compiled."""

import jax
from ml_collections import ConfigDict

from experiments.tasks import make_task
from experiments.values import at_least, check_types, check_values, defaults
from relpos_jax.errors import InputError
from relpos_jax.training.sharding import mesh_sizes

_CHOICES = {
  "training.schedule": ("paper", "inverse_sqrt"),
  "training.prng": ("threefry2x32", "rbg", "unsafe_rbg"),
}
_NUMBERS = (
  ("from 0 to 2**32 - 1", lambda x: 0 <= x < 2**32, ("seed",)),
  at_least(1, "training.num_steps", "training.warmup_steps", "training.num_microbatches"),
  at_least(1, "training.eval_every", "training.save_every", "training.keep_checkpoints"),
  at_least(1, "training.max_skipped", "decoding.average_checkpoints"),
  ("above 0", lambda x: 0 < x < float("inf"), ("training.learning_rate",)),
)


def validate(config: ConfigDict, num_devices: int | None = None) -> None:
  """Holds a config against the meaning of its values, in a second and without any data.

  `num_devices`: that the mesh may have; by default those here.

  Raises:
    InputError: names the first value that is wrong, and the remedy.
  """
  check_types(config, defaults(config))
  check_values(config, _CHOICES, _NUMBERS)
  if config.decoding.average_checkpoints > config.training.keep_checkpoints:
    raise InputError(
      f"config.decoding.average_checkpoints is {config.decoding.average_checkpoints}, but only "
      f"{config.training.keep_checkpoints} are kept: raise config.training.keep_checkpoints"
    )
  sizes = mesh_sizes(num_devices or jax.device_count(), **config.mesh)
  make_task(config).check(sizes)
  for name in ("num_heads", "feed_forward"):
    if config.model[name] % sizes["tensor"]:
      raise InputError(
        f"config.mesh.tensor is {sizes['tensor']}: give a divisor of config.model.{name}, "
        f"{config.model[name]}"
      )
