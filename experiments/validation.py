"""Checks a config before anything is loaded or compiled."""

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Mapping
from typing import Literal, get_args, get_origin

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from configs import default
from relpos_jax.data.corpus import SOURCES
from relpos_jax.data.tokenizer import KINDS
from relpos_jax.errors import InputError
from relpos_jax.models.seq2seq import Transformer, TransformerConfig
from relpos_jax.training.sharding import mesh_sizes, num_rows_together

_CHOICES = {
  "data.source": SOURCES,
  "vocabulary.kind": KINDS,
  "training.schedule": ("paper", "inverse_sqrt"),
  "training.prng": ("threefry2x32", "rbg", "unsafe_rbg"),
  # Those of sacreBLEU that need no further package or download.
  "evaluation.tokenize": ("13a", "intl", "zh", "char", "none"),
} | {
  f"model.{field.name}": get_args(field.type)
  for field in dataclasses.fields(TransformerConfig)
  if get_origin(field.type) is Literal
}
_NUMBERS = (
  ("from 0 to 2**32 - 1", lambda x: 0 <= x < 2**32, ("seed", "data.embedded.seed")),
  (
    "at least 1",
    lambda x: x >= 1,
    (
      *("batches.tokens", "batches.max_length", "batches.num_shapes"),
      *("model.num_layers", "model.width", "model.num_heads", "model.feed_forward"),
      *("training.num_steps", "training.warmup_steps", "training.num_microbatches"),
      *("training.eval_every", "training.save_every", "training.keep_checkpoints"),
      *("training.max_skipped", "training.num_samples"),
      *("decoding.beam_size", "decoding.average_checkpoints"),
    ),
  ),
  (
    "at least 0",
    lambda x: 0 <= x < math.inf,
    ("model.max_distance", "decoding.length_penalty", "decoding.extra_length"),
  ),
  (
    "from 0 to below 1",
    lambda x: 0 <= x < 1,
    (
      *("model.embedding_dropout_rate", "model.dropout_rate", "model.attention_dropout_rate"),
      *("model.feed_forward_dropout_rate", "training.label_smoothing"),
    ),
  ),
  ("above 0", lambda x: 0 < x < math.inf, ("training.learning_rate",)),
)


def validate(config: ConfigDict, num_devices: int | None = None) -> None:
  """Holds a config against the meaning of its values, in a second and without any data.

  `num_devices`: that the mesh may have; by default those here.

  Raises:
    InputError: names the first value that is wrong, and the remedy.
  """
  check_types(config, default.get_config())
  values = flatten(config)
  for name, choices in _CHOICES.items():
    if values[name] not in choices:
      raise InputError(f"config.{name} is {values[name]!r}: choose one of {', '.join(choices)}")
  for wanted, fits, names in _NUMBERS:
    for name in names:
      if not fits(values[name]):
        raise InputError(f"config.{name} is {values[name]}: give a number {wanted}")
  _check_languages(config.data)
  _check_subwords(config)
  _check_together(config)
  _check_mesh(config, mesh_sizes(num_devices or jax.device_count(), **config.mesh))
  _check_model(config)


def _check_languages(data: ConfigDict) -> None:
  if not re.fullmatch("[a-z]{2,3}-[a-z]{2,3}", data.languages):
    raise InputError(f"config.data.languages is {data.languages!r}: give from-to, as en-de")
  if data.source == "embedded" and data.languages != "en-de":
    raise InputError(f"config.data.languages is {data.languages!r}: the embedded corpus is en-de")


def _check_subwords(config: ConfigDict) -> None:
  mark, prepared = config.evaluation.subword_mark, is_prepared(config)
  if re.search(r"\s", mark):
    raise InputError(
      f"config.evaluation.subword_mark is {mark!r}: give what stands before the space, as @@"
    )
  if prepared and not mark:
    raise InputError(
      "config.data.multi30k.prepared is text in subwords: set config.evaluation.subword_mark=@@"
    )
  if mark and config.data.moses:
    raise InputError(
      f"config.data.moses would part {mark} from its subword: set config.data.moses=False, "
      "or config.evaluation.subword_mark to nothing"
    )


def is_prepared(config: ConfigDict) -> bool:
  """Whether the text is the published baseline's, in Moses tokens and subwords."""
  return config.data.source == "multi30k" and config.data.multi30k.prepared


def _check_together(config: ConfigDict) -> None:
  if config.model.share_embeddings and not config.vocabulary.joint:
    raise InputError(
      "config.model.share_embeddings needs one vocabulary for both languages: "
      "set config.vocabulary.joint=True or config.model.share_embeddings=False"
    )
  if config.decoding.average_checkpoints > config.training.keep_checkpoints:
    raise InputError(
      f"config.decoding.average_checkpoints is {config.decoding.average_checkpoints}, but only "
      f"{config.training.keep_checkpoints} are kept: raise config.training.keep_checkpoints"
    )


def _check_mesh(config: ConfigDict, sizes: Mapping[str, int]) -> None:
  """Every batch, that of the longest pairs too, is divided over the mesh and microbatches."""
  tokens, longest = config.batches.tokens, config.batches.max_length
  together, num_parts = num_rows_together(sizes), config.training.num_microbatches
  longest += -longest % sizes["sequence"]
  if tokens // longest < together * num_parts:
    raise InputError(
      f"config.batches.tokens is {tokens}, {tokens // longest} rows of config.batches.max_length "
      f"{longest}, which {together} devices and {num_parts} microbatches cannot divide: give "
      f"{longest * together * num_parts} tokens or more, or lower config.mesh.data"
    )
  for name in ("num_heads", "feed_forward"):
    if config.model[name] % sizes["tensor"]:
      raise InputError(
        f"config.mesh.tensor is {sizes['tensor']}: give a divisor of config.model.{name}, "
        f"{config.model[name]}"
      )


def model_config(config: ConfigDict, source_vocab_size: int, target_vocab_size: int):
  """The `TransformerConfig` of `config.model`."""
  values = config.model.to_dict() | dict(implementation=config.model.implementation or None)
  return TransformerConfig(source_vocab_size, target_vocab_size, **values)


def _check_model(config: ConfigDict) -> None:
  """Traces training and decoding without computing: what the operator refuses, it refuses here."""
  try:
    one_layer = dataclasses.replace(model_config(config, 8, 8), num_layers=1)  # all are alike
    _trace(one_layer, config.batches.max_length)
  except (ValueError, NotImplementedError) as error:
    raise InputError(f"config.model: {' '.join(str(error).split())}") from error


@functools.cache  # for the cells of a sweep: many have one model
def _trace(config: TransformerConfig, length: int) -> None:
  def run(tokens):
    model = Transformer(config, rngs=nnx.Rngs(0))
    model(tokens, tokens, rngs=nnx.Rngs(dropout=0))
    return model.decode(tokens[:, :1], model.init_cache(1, 1), model.remember(tokens))

  jax.eval_shape(run, jax.ShapeDtypeStruct((1, length), jnp.int32))


def check_types(config: ConfigDict, defaults: ConfigDict) -> None:
  """Holds the keys of `config` and the types of its values against those of `defaults`.

  An int may stand where a float belongs, but neither a bool where an int belongs nor an int where a
  tuple does. The entries of a tuple have the types of the default's entries; where the default is
  an empty tuple or None, anything goes.

  Raises:
    InputError: names the dotted key that is unknown, missing or of another type.

  >>> defaults = ConfigDict(dict(model=dict(width=512, rate=0.1)))
  >>> check_types(ConfigDict(dict(model=dict(width=128, rate=0))), defaults)
  >>> check_types(ConfigDict(dict(model=dict(width=True, rate=0.1))), defaults)
  Traceback (most recent call last):
  ...
  relpos_jax.errors.InputError: config.model.width must be of type int, not True (bool)
  """
  values, wanted = flatten(config), flatten(defaults)
  for name in values:
    if name not in wanted:
      raise unknown_key(name, defaults)
  for name, example in wanted.items():
    if name not in values:
      raise InputError(f"config.{name} is missing: start from the values of configs/default.py")
    if not _fits(values[name], example):
      value = values[name]
      raise InputError(
        f"config.{name} must be of type {_type_name(example)}, "
        f"not {value!r} ({type(value).__name__})"
      )


def has_key(name: str, config: ConfigDict) -> bool:
  """Whether `config` has the dotted key, of a value or of a group of them.

  >>> has_key("model.width", ConfigDict(dict(model=dict(width=512))))
  True
  """
  for part in name.split("."):
    if not isinstance(config, ConfigDict) or part not in config:
      return False
    config = config[part]
  return True


def unknown_key(name: str, config: ConfigDict) -> InputError:
  """The error for a key that `config` lacks, naming the likeliest key meant.

  >>> print(unknown_key("model.widht", ConfigDict(dict(model=dict(width=512)))))
  unknown config.model.widht: did you mean config.model.width?
  """
  names = list(flatten(config))
  close = difflib.get_close_matches(name, names, n=1)
  same_last_part = [known for known in names if known.split(".")[-1] == name.split(".")[-1]]
  for known in [*same_last_part, *close]:
    return InputError(f"unknown config.{name}: did you mean config.{known}?")
  return InputError(f"unknown config.{name}: configs/default.py explains every key there is")


def changes(config: ConfigDict, base: ConfigDict) -> dict[str, object]:
  """The values of `config` by dotted key that differ from those of `base`.

  >>> base = ConfigDict(dict(seed=0, model=dict(width=512, rate=0.1)))
  >>> changes(ConfigDict(dict(seed=0, model=dict(width=128, rate=0.1))), base)
  {'model.width': 128}
  """
  before = flatten(base)
  return {
    name: value
    for name, value in flatten(config).items()
    if name not in before or value != before[name]
  }


def flatten(config: ConfigDict, prefix: str = "") -> dict[str, object]:
  """Every value by its dotted key; a group without any is its own value."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, ConfigDict):
      flat |= flatten(value, f"{prefix}{key}.") or {f"{prefix}{key}": {}}
    else:
      flat[prefix + key] = value
  return flat


def _fits(value: object, default: object) -> bool:
  if default is None:
    return True
  if isinstance(default, tuple):
    fits_one = lambda entry: not default or any(_fits(entry, wanted) for wanted in default)
    return isinstance(value, tuple) and all(fits_one(entry) for entry in value)
  if type(default) is float:
    return type(value) in (int, float)
  return type(value) is type(default)


def _type_name(default: object) -> str:
  if not isinstance(default, tuple) or not default:
    return type(default).__name__
  return f"tuple of {' or '.join(dict.fromkeys(type(entry).__name__ for entry in default))}"
