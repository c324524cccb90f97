"""Tells which claims hold on a device, from the results of first_device.sh.

The claims in `CLAIMS` bound the time of one attention function by the time of another.
Two more claims are that the temporary memory of kernels stays within `KERNEL_MEMORY`,
and that the tests on the device pass.
"""

import json
import math
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from experiments.benchmark import attention
from experiments.benchmark.schemes import SCHEMES
from experiments.benchmark.timing import Record
from experiments.errors import InputError
from experiments.evaluation.tables import markdown_table

COLUMNS = "claim", "asked", "measured", "holds"
KERNEL_MEMORY = 2.0  # times the bytes of the queries


class Claim(NamedTuple):
  """Claims that the time of `name` is at most `most` times the time of `against`.

  The claim is for sequences of one length.
  """

  name: str
  against: str
  length: int
  most: float


KERNELS = "mosaic_gpu", "pallas_gpu"
CLAIMS = (
  *[Claim(kernel, "cudnn", 4096, 1.30) for kernel in KERNELS],
  *[Claim(kernel, "cudnn", 16384, 1.15) for kernel in KERNELS],
  Claim("chunked", "jax.nn", 4096, 1.0),
  *[Claim(scheme, "dense_bias", 4096, 1.0) for scheme in SCHEMES],
)


def print_claims(out: pathlib.Path, device: str) -> None:
  """Prints a table: each claim, what was measured, and whether the claim holds.

  The measurements are in OUT/attention/DEVICE*.json, and the output of the tests is in
  OUT/first_device/parity*. Claims without results are left out.
  """
  rows = [*_judge_tests(out / "first_device")]
  for path in sorted((out / "attention").glob(f"{device}*.json")):
    cases = json.loads(path.read_text("utf-8"))["cases"]
    for case in sorted(cases, key=lambda case: case["length"]):
      rows += _judge_case(case)
  if not rows:
    raise InputError(
      f"no results of {device or 'any device'} in {out} decide a claim: run "
      f"`experiments/first_device.sh --out={out}`, or benchmark attention"
    )
  print(markdown_table(COLUMNS, rows))


def _judge_tests(folder: pathlib.Path) -> Iterator[list[str]]:
  for path in sorted([*folder.glob("parity*.log"), *folder.glob("parity*.failed")]):
    summaries = re.findall(r"\d+ (?:passed|failed).*? in [\d.]+s", path.read_text())
    measured = summaries[-1] if summaries else "not finished"
    holds = path.suffix == ".log"
    yield [f"tests {path.stem}", "none fails", measured, _answer(holds)]


def _judge_case(case: Record) -> Iterator[list[str]]:
  times = attention.estimate_milliseconds(case)
  kind = f"{attention.describe_case(case)}, {case['dtype']}, T = {case['length']:,}"
  for claim in CLAIMS:
    if claim.length != case["length"] or not {claim.name, claim.against} <= {*times}:
      continue
    ratio = times[claim.name] / times[claim.against]
    name = f"time of {claim.name} / {claim.against}, {kind}"
    yield _bound(name, claim.most, ratio)
  sizes = [case[name] for name in ("batch", "length", "heads", "width")]
  query_bytes = math.prod(sizes) * (2 if case["dtype"] == "bfloat16" else 4)
  for name in KERNELS:
    used = case["contestants"].get(name, {}).get("temporary_bytes")
    if used:
      ratio = used / query_bytes
      yield _bound(f"memory of {name} / queries, {kind}", KERNEL_MEMORY, ratio)


def _bound(name: str, most: float, measured: float) -> list[str]:
  return [name, f"at most {most:.2f}", f"{measured:.2f}", _answer(measured <= most)]


def _answer(holds: bool) -> str:
  return "yes" if holds else "**no**"
