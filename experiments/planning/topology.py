"""Chips that are not there: the TPU's compiler, and the devices of a topology."""

import importlib.metadata
import math
import os
import re
from typing import NamedTuple

import jax
from jax.experimental import topologies

from experiments.planning.roofline import CHIPS
from relpos_jax.errors import InputError

# What libtpu reads where there is no TPU; it and JAX read it when they are loaded.
NO_TPU = dict(
  JAX_PLATFORMS="cpu",
  TPU_SKIP_MDS_QUERY="1",
  TPU_ACCELERATOR_TYPE="v5litepod-4",
  TPU_WORKER_HOSTNAMES="localhost",
  ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)

# A chip of v4 has two cores, which are one device as Cloud TPU sets it up.
_OPTIONS = dict(v4=dict(chip_config_name="megacore"))


def compiler_version() -> str:
  """The version of libtpu, the TPU's compiler.

  Raises:
    InputError: it is not installed.
  """
  try:
    return importlib.metadata.version("libtpu")
  except importlib.metadata.PackageNotFoundError as error:
    raise InputError("no libtpu, the TPU's compiler: pip install -e '.[tpu]'") from error


class Topology(NamedTuple):
  """The kind of chip, how many there are, and in how many slices."""

  chip: str
  num_chips: int
  num_slices: int


def parse(name: str, num_slices: int = 1) -> Topology:
  """What a topology's name says, of so many slices that are alike.

  Raises:
    InputError: the figures of its chips are not known, it has no shape, or there is no slice.

  >>> parse("v5e:2x4", num_slices=2)
  Topology(chip='v5e', num_chips=16, num_slices=2)
  """
  found = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)+)", name)
  if not found or found[1] not in CHIPS:
    known = ", ".join(CHIPS)
    raise InputError(f"--topology={name}: give one of {known} and a shape, such as v5e:2x4")
  if num_slices < 1:
    raise InputError(f"--num_slices={num_slices}: give 1 or more")
  if num_slices > 1 and not CHIPS[found[1]].slice_bandwidth:
    able = ", ".join(chip for chip in CHIPS if CHIPS[chip].slice_bandwidth)
    raise InputError(
      f"--num_slices={num_slices}: what {found[1]} has between slices is not known, "
      f"only what {able} have"
    )
  return Topology(found[1], num_slices * math.prod(map(int, found[2].split("x"))), num_slices)


def leave_tpus_alone() -> None:
  """Makes JAX compute on the CPU, and libtpu look for no TPU: before anything is computed."""
  os.environ.update(NO_TPU)
  jax.config.update("jax_platforms", "cpu")


def chips(name: str, num_slices: int = 1) -> list[jax.Device]:
  """The chips of a topology, to compile for; `leave_tpus_alone` goes first.

  Raises:
    InputError: libtpu knows no such topology.
  """
  options = _OPTIONS.get(name.partition(":")[0], {})
  if num_slices > 1:
    options = options | dict(num_slices=num_slices)
  try:
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    reason = " ".join(str(error).split())[:200]
    raise InputError(f"--topology={name} ({reason}): give such as v5e:2x4") from error
