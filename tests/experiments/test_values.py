"""Tests that the keys and types of a config are checked against the defaults'."""

import pytest
from ml_collections import ConfigDict

from relpos_jax.config import check_types, unknown_key
from relpos_jax.errors import InputError

MODEL = dict(width=512, rate=0.1, relative=True, norm="pre", rest=dict())
DEFAULTS = ConfigDict(dict(seed=0, model=MODEL))


def check(**changes):
  check_types(ConfigDict(dict(seed=0, model=MODEL | changes)), DEFAULTS)


def test_values_of_the_default_type_pass():
  check(rate=1, width=-1)
  check(rate=2.5)


@pytest.mark.parametrize(
  "key, value, wanted",
  [
    *(("width", True, "int"), ("width", 3.0, "int"), ("rate", "0.1", "float")),
    *(("rate", False, "float"), ("relative", 1, "bool"), ("norm", 3, "str"), ("rest", 3, "dict")),
  ],
)
def test_a_value_of_another_type_is_named_with_the_type_wanted(key, value, wanted):
  with pytest.raises(InputError, match=f"model.{key} must be of type {wanted}, not {value!r}"):
    check(**{key: value})


def test_unknown_and_missing_keys_are_named():
  with pytest.raises(InputError, match=r"config\.model\.widht: did you mean config\.model\.width"):
    check(widht=3)
  with pytest.raises(InputError, match=r"config\.model\.\w+ is missing"):
    check_types(ConfigDict(dict(seed=0)), DEFAULTS)
  assert "did you mean" not in str(unknown_key("zzz", DEFAULTS))
  text = "unknown config.data.norm: did you mean config.model.norm?"  # the same last part
  assert str(unknown_key("data.norm", DEFAULTS)) == text
