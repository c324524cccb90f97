"""The peaks of TPU chips, and the TPU's compiler, which needs no TPU."""

import importlib.util
import math
import os
import re
from typing import NamedTuple

import jax
from jax.experimental import topologies

from experiments.errors import InputError

# Makes libtpu and JAX, which read these when they are loaded, look for no TPU.
NO_TPU = dict(
  JAX_PLATFORMS="cpu",
  TPU_SKIP_MDS_QUERY="1",
  TPU_ACCELERATOR_TYPE="v5litepod-4",
  TPU_WORKER_HOSTNAMES="localhost",
  ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)


class Chip(NamedTuple):
  """Peak figures of one chip; rates are per second."""

  flops: float  # bfloat16
  hbm: float  # bytes
  hbm_bandwidth: float
  source: str


_DOCS = "docs.cloud.google.com/tpu/docs"
CHIPS = {
  "v4": Chip(275e12, 32 * 2**30, 1200e9, f"{_DOCS}/v4"),
  "v5e": Chip(197e12, 16e9, 819e9, f"{_DOCS}/v5e"),
  "v5p": Chip(459e12, 95e9, 2765e9, f"{_DOCS}/v5p"),
  "v6e": Chip(918e12, 32e9, 1600e9, f"{_DOCS}/v6e"),
}


def parse(name: str) -> tuple[str, int]:
  """Reads the kind of chip and the number of chips from a topology.

  >>> parse("v5e:2x4")
  ('v5e', 8)
  """
  found = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)+)", name)
  if not found or found[1] not in CHIPS:
    known = ", ".join(CHIPS)
    raise InputError(f"--topology={name}: give one of {known} and a shape, such as v5e:2x4")
  return found[1], math.prod(map(int, found[2].split("x")))


def use_compiler() -> None:
  """Makes JAX compute on the CPU and libtpu look for no TPU; call it before any computation.

  Raises:
    InputError: libtpu, the TPU's compiler, is missing.
  """
  if not importlib.util.find_spec("libtpu"):
    raise InputError("no libtpu, the TPU's compiler: pip install -e '.[tpu]'")
  os.environ.update(NO_TPU)
  jax.config.update("jax_platforms", "cpu")


def chips(name: str) -> list[jax.Device]:
  """Returns the chips of a topology to compile for; call `use_compiler` first."""
  # A chip of v4 has two cores, which are one device as Cloud TPU sets it up.
  options = dict(chip_config_name="megacore") if name.startswith("v4:") else {}
  return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
