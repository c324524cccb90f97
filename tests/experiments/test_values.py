"""Keys and types of a config are held against the defaults'."""

import pytest
from ml_collections import ConfigDict

from relpos_jax.config import check_types, has_key, unknown_key
from relpos_jax.errors import InputError

DEFAULTS = dict(
  seed=0, model=dict(width=512, rate=0.1, relative=True, norm="pre", layers=(1, 2), rest=dict())
)


def check(**changes):
  changed = DEFAULTS | dict(model=DEFAULTS["model"] | changes)
  check_types(ConfigDict(changed), ConfigDict(DEFAULTS))


@pytest.mark.parametrize(
  "key, value", [("rate", 1), ("rate", 2.5), ("layers", (3, 4, 5)), ("layers", ()), ("width", -1)]
)
def test_values_of_the_default_type_pass(key, value):
  check(**{key: value})


@pytest.mark.parametrize(
  "key, value, wanted",
  [
    ("width", True, "int"),
    ("width", 3.0, "int"),
    ("width", "3", "int"),
    ("width", None, "int"),
    ("rate", "0.1", "float"),
    ("rate", False, "float"),
    ("relative", 1, "bool"),
    ("norm", 3, "str"),
    ("layers", 3, "tuple of int"),
    ("layers", [3, 4], "tuple of int"),
    ("layers", (3, "a"), "tuple of int"),
    ("rest", 3, "dict"),
  ],
)
def test_a_value_of_another_type_is_named_with_the_type_wanted(key, value, wanted):
  with pytest.raises(InputError) as error:
    check(**{key: value})
  text = str(error.value)
  assert text.startswith(f"config.model.{key} must be of type {wanted}, not {value!r}")
  assert "\n" not in text


def test_an_unknown_key_is_named_with_the_likeliest_one():
  with pytest.raises(InputError, match=r"config\.model\.widht: did you mean config\.model\.width"):
    check(widht=3)


def test_a_missing_key_is_named():
  with pytest.raises(InputError, match=r"config\.model\.norm is missing"):
    values = ConfigDict(DEFAULTS)
    del values.model["norm"]
    check_types(values, ConfigDict(DEFAULTS))


def test_a_group_where_a_value_belongs_and_the_reverse_are_refused():
  with pytest.raises(InputError, match=r"config\.model\.width"):
    check(width=ConfigDict(dict(encoder=3)))
  with pytest.raises(InputError, match=r"config\.model"):
    check_types(ConfigDict(dict(seed=0, model=3)), ConfigDict(DEFAULTS))


def test_has_key_knows_groups_and_values():
  config = ConfigDict(DEFAULTS)
  assert all(has_key(name, config) for name in ("seed", "model", "model.width"))
  assert not any(has_key(name, config) for name in ("width", "model.x", "seed.x", "", "model."))


def test_unknown_key_prefers_the_same_last_part():
  text = str(unknown_key("data.norm", ConfigDict(DEFAULTS)))
  assert text == "unknown config.data.norm: did you mean config.model.norm?"
  assert "did you mean" not in str(unknown_key("zzz", ConfigDict(DEFAULTS)))
