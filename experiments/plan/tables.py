"""Tables of plans: the compiler's counts, and a roofline estimate from them.

  python -m experiments.plan.tables --out=results

rewrites the tables of all plans in a folder.
"""

import collections
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments import command
from experiments.evaluation.tables import markdown_table, rewrite_blocks
from experiments.plan import ACROSS, CHIPS, Chip
from experiments.training.workdir import short_commit

Plan = Mapping[str, Any]
Step = Mapping[str, Any]


def estimate(chip: Chip, step: Step) -> dict[str, float]:
  """Computes the seconds of each part of one chip's step at its peak: a roofline.

  Williams et al. 2009, with the network within a slice and that between slices as further roofs. A
  step takes the longest part if all parts overlap perfectly, and their sum if none overlap.
  """
  sent = {kind: row["sent_bytes"] for kind, row in step["collectives"].items()}
  slice_bytes = sent.pop(ACROSS, 0)
  return dict(
    compute=step["flops"] / chip.flops,
    memory=step["hbm_bytes"] / chip.hbm_bandwidth,
    # A ring over all chips passes through each by two of its links, once in either direction.
    network=sum(sent.values()) / (2 * chip.link_bandwidth),
    slices=slice_bytes / chip.slice_bandwidth if slice_bytes else 0.0,
  )


def efficiencies(plans: Iterable[Plan]) -> list[tuple[Plan, Plan, list[float]]]:
  """Compares the same training on different numbers of chips.

  Returns each plan, the plan on the fewest chips, and the tokens a second and chip of the former
  over those of the latter: if all parts of a step overlap, and if none do.
  """
  groups = collections.defaultdict(list)
  for plan in sorted(plans, key=lambda plan: plan["num_chips"]):
    # The same training has the same values of all but the chips and the tokens.
    config = {name: x for name, x in plan["config"].items() if name not in ("name", "mesh", "data")}
    config["batches"] = {name: x for name, x in config["batches"].items() if name != "tokens"}
    step, effort = plan["steps"][-1], plan.get("effort", "full")
    if not step["refused"]:
      training = plan["chip"], effort, step.get("num_kernels", 0), sorted(config.items())
      groups[str(training)].append(plan)

  def rates(plan: Plan) -> list[float]:
    parts = estimate(CHIPS[plan["chip"]], plan["steps"][-1]).values()
    return [_tokens_per_chip(plan) / seconds for seconds in (max(parts), sum(parts))]

  return [
    (plan, fewest, [x / first for x, first in zip(rates(plan), rates(fewest), strict=True)])
    for fewest, *others in groups.values()
    if others and fewest["num_chips"] < others[-1]["num_chips"]
    for plan in (fewest, *others)
  ]


def _tokens_per_chip(plan: Plan) -> float:
  step = plan["steps"][-1]
  return step["rows"] * step["length"] / plan["num_chips"]


def main(out: str) -> None:
  """Rewrites the blocks of each out/TITLE.md from the out/plans/TITLE*.json."""
  pages = collections.defaultdict(list)
  for path in sorted(pathlib.Path(out, "plans").glob("*.json")):
    plan = json.loads(path.read_text(encoding="utf-8"))
    pages[plan["name"].partition("-")[0]].append(plan)
  for title, plans in pages.items():
    rewrite_blocks(pathlib.Path(out, f"{title}.md"), blocks(plans))


def blocks(plans: Sequence[Plan]) -> dict[str, str]:
  """Returns the tables of plans by the names of their blocks."""
  steps = [(plan, step) for plan in plans for step in plan["steps"]]
  fit = [(plan, step) for plan, step in steps if not step["refused"]]
  rows = dict(
    memory=[_names(plan) | _memory(plan, step) for plan, step in steps],
    work=[_names(plan) | _work(step) for plan, step in fit],
    estimates=[_names(plan) | _estimates(plan, step) for plan, step in fit],
    scaling=[_names(plan) | _scaling(plan, *others) for plan, *others in efficiencies(plans)],
    chips=[_chip(name) for name in dict.fromkeys(plan["chip"] for plan in plans)],
    commands=[_command(plan) for plan in plans],
  )
  table = lambda rows: markdown_table([*rows[0]], [[*row.values()] for row in rows])
  return {name: table(of) for name, of in rows.items() if of}


def _names(plan: Plan) -> dict[str, str]:
  where, num_slices = plan["topology"], plan.get("num_slices", 1)
  where += f", {num_slices} slices" * (num_slices > 1)
  sizes = plan["config"].get("mesh", {}).items()
  axes = [f"{name} {size}" for name, size in sizes if name != "data" and size != 1]
  return dict(plan=plan["name"], chips=", ".join([f"{plan['num_chips']} ({where})", *axes]))


def _memory(plan: Plan, step: Step) -> dict[str, str]:
  if step["refused"]:
    sizes = dict(argument="-", temporary="-", peak=step["refused"])
  else:
    sizes = {x: _gigabytes(step[f"{x}_bytes"]) for x in ("argument", "temporary", "peak")}
  batch = dict(batch=f"{step['rows']} x {step['length']}", parameters=f"{plan['parameters']:,}")
  return batch | sizes | {"memory of a chip": _gigabytes(CHIPS[plan["chip"]].hbm)}


def _work(step: Step) -> dict[str, str]:
  sent = step["collectives"].items()
  return {
    "10^12 operations": f"{step['flops'] / 1e12:.2f}",
    "memory traffic": _gigabytes(step["hbm_bytes"]),
    "collectives, bytes and calls": ", ".join(
      f"{kind}: {_gigabytes(row['num_bytes'])} in {row['times']}" for kind, row in sent
    ),
    "Pallas calls": str(step["num_kernels"]),
    "loops": str(step["num_loops"]),
  }


def _estimates(plan: Plan, step: Step) -> dict[str, str]:
  parts = estimate(CHIPS[plan["chip"]], step)
  low, high = max(parts.values()), sum(parts.values())
  hours = plan["num_steps"] / 3600
  return {name: f"{1000 * part:.1f} ms" for name, part in parts.items()} | {
    "a step": f"{1000 * low:.1f} to {1000 * high:.1f} ms",
    "all updates": f"{hours * low:.1f} to {hours * high:.1f} h",
  }


def _scaling(plan: Plan, fewest: Plan, parts: Sequence[float]) -> dict[str, str]:
  return {
    "tokens a chip": f"{_tokens_per_chip(plan):,.0f}",
    "against": f"{fewest['num_chips']} chips",
    "if all overlap": f"{parts[0]:.3f}",
    "if none overlap": f"{parts[1]:.3f}",
  }


def _chip(name: str) -> dict[str, str]:
  chip = CHIPS[name]
  slices = f"{_gigabytes(chip.slice_bandwidth)}/s" if chip.slice_bandwidth else "unknown"
  return {
    "chip": name,
    "bfloat16 operations a second": f"{chip.flops / 1e12:.0f} * 10^12",
    "memory": _gigabytes(chip.hbm),
    "its bandwidth": f"{_gigabytes(chip.hbm_bandwidth)}/s",
    "links, one way": f"{chip.links} of {_gigabytes(chip.link_bandwidth)}/s",
    "between slices, one way": slices,
    "source": chip.source,
  }


def _command(plan: Plan) -> dict[str, str]:
  where = plan["environment"]
  return {
    "plan": plan["name"],
    "compiler's effort": plan.get("effort", "full"),
    "date": where["date"][:10],
    "Python": where["python"],
    **{name: where["packages"][name] for name in ("jax", "libtpu")},
    "commit": short_commit(where["git_commit"]),
    "command": f"`{where['command']}`",
  }


def _gigabytes(num_bytes: float) -> str:
  if num_bytes < 5e5:
    return "0.000 GB"
  return f"{num_bytes / 1e9:.3g} GB" if num_bytes < 1e12 else f"{num_bytes / 1e9:,.0f} GB"


if __name__ == "__main__":
  command.run(main, dict(out=command.Flag("results", "the folder of plans/ and of the pages")))
