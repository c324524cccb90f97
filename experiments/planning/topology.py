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
  """What a topology's name says: the kind of chip, and how many there are."""

  chip: str
  num_chips: int


def parse(name: str) -> Topology:
  """What a topology's name says.

  Raises:
    InputError: the figures of its chips are not known, or it has no shape.

  >>> parse("v5e:2x4")
  Topology(chip='v5e', num_chips=8)
  """
  found = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)", name)
  if not found or found[1] not in CHIPS:
    known = ", ".join(CHIPS)
    raise InputError(f"--topology={name}: give one of {known} and a shape, such as v5e:2x4")
  return Topology(found[1], math.prod(map(int, found[2].split("x"))))


def leave_tpus_alone() -> None:
  """Makes JAX compute on the CPU, and libtpu look for no TPU: before anything is computed."""
  os.environ.update(NO_TPU)
  jax.config.update("jax_platforms", "cpu")


def chips(name: str) -> list[jax.Device]:
  """The chips of a topology, to compile for; `leave_tpus_alone` goes first.

  Raises:
    InputError: libtpu knows no such topology.
  """
  try:
    return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    reason = " ".join(str(error).split())[:200]
    raise InputError(f"--topology={name} ({reason}): give such as v5e:2x4") from error
