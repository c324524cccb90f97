"""The tables of plans: what the compiler says of a step, and estimates from it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.planning.collectives import ACROSS
from experiments.planning.roofline import CHIPS
from experiments.planning.scaling import (
  Efficiency,
  Plan,
  efficiencies,
  effort,
  estimate,
  tokens_a_chip,
)

# What data parallelism needs: the gradients' sum. Over slices the compiler does it in parts, and
# over those of a sequence keys are gathered and their gradients scattered.
EXPECTED = {"all-reduce"}
_IN_PARTS = EXPECTED | {"reduce-scatter", "all-gather", "collective-permute"}

_COUNTED = """## What the compiler says

The peak is what it sets aside in the chip's memory, for arguments (parameters, Adam's moments, the
batch) and temporary arrays. Operations and traffic are its own count, which counts a loop's body
once and takes the attention kernels' word for what they do, that of the chip with the last tokens
of a sequence, which sees most keys; traffic between chips is read in the compiled program.

The axis `data` cuts rows of a batch, and leaves all parameters on every chip. Where others are
named, `fsdp` cuts rows and parameters, `tensor` heads and hidden width, and `sequence` tokens with
all that is computed of them, logits too: each layer gathers keys and values.
"""
_ESTIMATED = """## Estimates

Each part's time were it all that bounds the step, at the chip's peak figures below; the network as
a ring over two links of a chip, and between slices a chip's part of their network. A step takes no
less than the longest of them, and where nothing goes on beside anything else, at peak, their sum;
real steps do not reach the peaks.
"""
_SCALED = """## Scaling, an estimate

Nothing ran. Tokens a second and chip, as the times above have them, against those of the fewest
chips: where all parts of a step go on at once, and where none does beside another. A batch grows
with the chips; whether it learns as much is not asked. Bandwidth alone is counted. Left out are how
long messages take from chip to chip, chips that wait for the slowest, and reading data.
"""


def tables(plans: Sequence[Plan]) -> str:
  """The tables of some plans, in Markdown."""
  steps = [(plan, step) for plan in plans for step in plan["steps"]]
  chips = dict.fromkeys(plan["chip"] for plan in plans)
  return "\n".join(
    [
      *(_COUNTED, *_table(_COUNTED_HEAD, [_counted(*step) for step in steps]), *_notes(steps)),
      *(_ESTIMATED, *_table(_ESTIMATED_HEAD, [_estimated(*step) for step in steps])),
      *_table(_CHIP_HEAD, [_chip(name) for name in chips]),
      *_scaling([*efficiencies(plans)]),
    ]
  )


def _scaling(found: Sequence[Efficiency]) -> list[str]:
  return [_SCALED, *_table(_SCALED_HEAD, map(_scaled, found))] if found else []


_COUNTED_HEAD = (
  *("training", "chips", "parameters", "batch", "arguments", "temporary", "peak", "chip has"),
  *("fits", "10^12 operations", "traffic with memory", "between chips"),
)


def _counted(plan: Plan, step: Mapping[str, Any]) -> list[str]:
  has = CHIPS[plan["chip"]].hbm
  front = [*_name(plan), f"{plan['parameters']:,}", _batch(step)]
  if step["refused"]:
    return [*front, "", "", step["refused"], _gigabytes(has), "no", "", "", ""]
  return [
    *front,
    *(_gigabytes(step[f"{part}_bytes"]) for part in ("argument", "temporary", "peak")),
    _gigabytes(has),
    "yes" if step["peak_bytes"] <= has else "no",
    f"{step['flops'] / 1e12:.2f}",
    _gigabytes(step["hbm_bytes"]),
    ", ".join(
      f"{kind}: {_gigabytes(row['num_bytes'])} in {row['times']}"
      for kind, row in step["collectives"].items()
    ),
  ]


def expected(plan: Plan) -> set[str]:
  """The kinds of collectives that a plan's mesh needs."""
  across = {ACROSS} if plan.get("num_slices", 1) > 1 else set()
  is_cut = any(size > 1 for name, size in plan["config"].get("mesh", {}).items() if name != "data")
  return (_IN_PARTS if across or is_cut else EXPECTED) | across


def _notes(steps) -> list[str]:
  """What a reader of the counts must know."""
  lines = []
  for plan, step in steps:
    unexpected = {*step.get("collectives", ())} - expected(plan)
    notes = [
      f"{step.get('num_loops')} loops, of which one pass is counted" * bool(step.get("num_loops")),
      f"{step.get('num_kernels')} Pallas calls, by their word" * bool(step.get("num_kernels")),
      f"unexpected: {', '.join(sorted(unexpected))}" * bool(unexpected),
    ]
    if any(notes):
      lines.append(f"- {plan['name']}, {_batch(step)}: {'; '.join(filter(None, notes))}")
  return [*lines, ""] if lines else []


_ESTIMATED_HEAD = (
  *("training", "chips", "batch", "arithmetic", "memory", "network", "slices", "bound by"),
  *("a step, estimate", "all updates, estimate"),
)


def _estimated(plan: Plan, step: Mapping[str, Any]) -> list[str]:
  front = [*_name(plan), _batch(step)]
  if step["refused"]:
    return [*front, *[""] * 7]
  seconds = estimate(plan, step)
  bounds = seconds.least, seconds.one_by_one
  return [
    *front,
    *(f"{1000 * part:.1f} ms" for part in seconds),
    seconds.bound,
    "{:.1f} to {:.1f} ms".format(*(1000 * bound for bound in bounds)),
    "{:.1f} to {:.1f} h".format(*(plan["num_steps"] * bound / 3600 for bound in bounds)),
  ]


_SCALED_HEAD = (
  *("training", "chips", "tokens a chip", "against", "a step, estimate"),
  *("efficiency, all at once", "efficiency, one by one"),
)


def _scaled(found: Efficiency) -> list[str]:
  bounds = found.seconds.least, found.seconds.one_by_one
  return [
    *_name(found.plan),
    f"{tokens_a_chip(found.plan, found.step):,.0f}",
    f"{found.fewest} chips",
    "{:.1f} to {:.1f} ms".format(*(1000 * bound for bound in bounds)),
    f"{found.least:.3f}",
    f"{found.one_by_one:.3f}",
  ]


_CHIP_HEAD = (
  *("chip", "operations a second", "memory", "its bandwidth", "links", "between slices", "source"),
)


def _chip(name: str) -> list[str]:
  chip = CHIPS[name]
  return [
    name,
    f"{chip.flops / 1e12:.0f} * 10^12, bfloat16",
    _gigabytes(chip.hbm),
    f"{_gigabytes(chip.hbm_bandwidth)}/s",
    f"{chip.links} of {_gigabytes(chip.link_bandwidth)}/s, one way",
    f"{_gigabytes(chip.slice_bandwidth)}/s, one way" if chip.slice_bandwidth else "not known",
    chip.source,
  ]


def _name(plan: Plan) -> list[str]:
  """Of the training, and its chips."""
  where, num_slices = plan["topology"], plan.get("num_slices", 1)
  if num_slices > 1:
    where += f", {num_slices} slices"
  sizes = plan["config"].get("mesh", {}).items()
  cut = [f"{name} {size}" for name, size in sizes if name != "data" and size != 1]
  least = " (least effort)" if effort(plan) == "least" else ""
  chips = f"{plan['num_chips']} x {plan['chip']} ({where})"
  return [plan["name"] + least, ", ".join([chips, *cut])]


def _batch(step: Mapping[str, Any]) -> str:
  return f"{step['rows']} x {step['length']}"


def _gigabytes(num_bytes: float) -> str:
  """
  >>> _gigabytes(16e9), _gigabytes(123_456_789), _gigabytes(4)
  ('16 GB', '0.123 GB', '0.000 GB')
  """
  if num_bytes < 5e5:
    return "0.000 GB"
  return f"{num_bytes / 1e9:.3g} GB" if num_bytes < 1e12 else f"{num_bytes / 1e9:,.0f} GB"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
  cells = [head, ["---"] * len(head), *rows]
  return [*(f"| {' | '.join(row)} |" for row in cells), ""]
