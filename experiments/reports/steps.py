"""The report on the price of a training step, steps.md: every number comes from the raw times."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.reports.markdown import table
from relpos_jax.errors import InputError
from relpos_jax.evaluation.cost import ratio_interval, ratio_quartiles
from relpos_jax.evaluation.record import hardware
from relpos_jax.training.workdir import short_commit, write_whole

TWIN, AGAIN = "sinusoidal", "sinusoidal (again)"
_MOST, _PAPER = 1.05, 1.07
_INTRO = """# The price of a training step

Written by `python -m experiments.step_benchmark` from every single time in `steps/*.json`. In each
round each model makes one step, the sinusoidal one twice. A ratio is of one round: to the mean of
its two sinusoidal steps, and of the second of these to the first, which is the noise. The median,
its 95% interval (percentiles of the medians of resampled rounds), and the quartiles of rounds. The
paper's price is 1.07 (Shaw et al. 2018, section 3.3).
"""
Results = Mapping[str, Any]


def write(out: pathlib.Path) -> pathlib.Path:
  """Writes out/steps.md, a section for each out/steps/*.json.

  Raises:
    InputError: one of them is damaged.
  """
  sections = [_INTRO]
  for file in sorted((out / "steps").glob("*.json")):
    try:
      sections += section(json.loads(file.read_text("utf-8")))
    except (LookupError, OSError, TypeError, ValueError) as error:
      raise InputError(
        f"{file} is not as experiments.step_benchmark writes it ({error!r}): restore or delete it"
      ) from error
  write_whole(out / "steps.md", "\n".join(sections))
  return out / "steps.md"


def section(results: Results) -> list[str]:
  """The lines on one measurement."""
  seconds, positions = results["seconds"], results["positions"]
  both = np.mean([seconds[TWIN], seconds[AGAIN]], axis=0).tolist()
  rows = [
    [TWIN, _milliseconds(seconds[TWIN]), "", "", ""],
    [AGAIN, _milliseconds(seconds[AGAIN]), *_ratio(seconds[AGAIN], seconds[TWIN])],
    [positions, _milliseconds(seconds[positions]), *_ratio(seconds[positions], both)],
  ]
  return [
    *_header(results),
    *table(["positions", "ms a step, median", "ratio", "95%", "quartiles"], rows),
    "",
    f"{positions.capitalize()} positions: {verdict(ratio_interval(seconds[positions], both))}",
    "",
  ]


def verdict(interval: tuple[float, float]) -> str:
  """What the interval of the median ratio says of the price that is aimed at, and the paper's.

  >>> print(verdict((1.01, 1.04)))
  a price of at most 1.05 is shown (1.0100 to 1.0400); the paper's 1.07 is above the interval.
  """
  low, high = interval
  shown = "is shown" if high <= _MOST else "is not so" if low > _MOST else "is not shown"
  where = "above" if high < _PAPER else "below" if low > _PAPER else "in"
  return (
    f"a price of at most {_MOST} {shown} ({low:.4f} to {high:.4f}); "
    f"the paper's {_PAPER} is {where} the interval."
  )


def _header(results: Results) -> list[str]:
  """What was measured, where and by what command."""
  where, (rows, length) = results["environment"], results["shape"]
  return [
    f"## {results['name']}",
    "",
    f"Width {results['width']}, {rows} x {length} tokens, {results['dtype']}, "
    f"{len(results['seconds'][TWIN])} rounds; config {results['digest']}. {hardware(where)}, "
    f"{where['date'][:10]}, jax {where['packages']['jax']}, "
    f"commit {short_commit(where['git_commit'])}.",
    "",
    f"```\n{where['command']}\n```",
    "",
  ]


def _milliseconds(seconds: Sequence[float]) -> str:
  return f"{1e3 * np.median(seconds):.1f}"


def _ratio(seconds: Sequence[float], against: Sequence[float]) -> list[str]:
  """The median, its interval and the quartiles."""
  first, median, third = ratio_quartiles(seconds, against)
  low, high = ratio_interval(seconds, against)
  return [f"{median:.3f}", f"{low:.3f} to {high:.3f}", f"{first:.3f} to {third:.3f}"]
