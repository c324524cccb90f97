"""Estimates of a step's time, and how much of each chip is left as more of them do more."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from experiments.planning import roofline
from experiments.planning.collectives import ACROSS
from experiments.planning.roofline import CHIPS, Estimate
from experiments.values import without_retired

Plan = Mapping[str, Any]
Step = Mapping[str, Any]

# What of a config differs between plans of one training on more and fewer chips.
_OF_THE_MACHINE = ("name", "mesh")


class Efficiency(NamedTuple):
  """Of a plan's longest step: tokens a second and chip, as a part of those with the fewest chips.

  `least` where all parts of a step go on at once, `one_by_one` where none does beside another.
  """

  plan: Plan
  step: Step
  seconds: Estimate
  fewest: int
  least: float
  one_by_one: float


def estimate(plan: Plan, step: Step) -> Estimate:
  """The roofline of a step."""
  sent = {kind: row["sent_bytes"] for kind, row in step["collectives"].items()}
  slice_bytes = sent.pop(ACROSS, 0)
  return roofline.estimate(
    CHIPS[plan["chip"]],
    flops=step["flops"],
    hbm_bytes=step["hbm_bytes"],
    sent_bytes=sum(sent.values()),
    slice_bytes=slice_bytes,
  )


def tokens_a_chip(plan: Plan, step: Step) -> float:
  """Of one side of a batch, padding included."""
  return step["rows"] * step["length"] / plan["num_chips"]


def efficiencies(plans: Iterable[Plan]) -> Iterator[Efficiency]:
  """Of each plan whose training is there with other numbers of such chips, fewest first."""
  for same in _by_training(plans).values():
    if len({plan["num_chips"] for plan in same}) > 1:
      yield from _efficiencies(sorted(same, key=lambda plan: plan["num_chips"]))


def _by_training(plans: Iterable[Plan]) -> dict[str, list[Plan]]:
  groups = {}
  for plan in plans:
    if not plan["steps"][-1]["refused"]:
      groups.setdefault(_training(plan), []).append(plan)
  return groups


def _training(plan: Plan) -> str:
  """What makes plans comparable; the tokens of a batch grow with the chips.

  Their kernels too: which attention a config chooses changes with the code.
  """
  config = without_retired(plan["config"]).to_dict()
  config = {name: x for name, x in config.items() if name not in _OF_THE_MACHINE}
  config["batches"] = {name: x for name, x in config["batches"].items() if name != "tokens"}
  kernels = plan["steps"][-1].get("num_kernels", 0)
  return str((plan["chip"], effort(plan), kernels, sorted(config.items())))


def effort(plan: Plan) -> str:
  """The compiler's; plans did not always say."""
  return plan.get("effort", "full")


def _efficiencies(plans: list[Plan]) -> Iterator[Efficiency]:
  first = None
  for plan in plans:
    step = plan["steps"][-1]
    seconds, tokens = estimate(plan, step), tokens_a_chip(plan, step)
    rates = tokens / seconds.least, tokens / seconds.one_by_one
    first = first or rates
    parts = (rate / of_first for rate, of_first in zip(rates, first, strict=True))
    yield Efficiency(plan, step, seconds, plans[0]["num_chips"], *parts)
