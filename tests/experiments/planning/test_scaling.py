"""Estimates of how training scales: their laws."""

import pytest

from experiments.planning.collectives import ACROSS
from experiments.planning.scaling import efficiencies, estimate


def plan_on(num_chips, *, rows_a_chip=16, hbm_bytes=819e9, sent_bytes=0.0, **changes):
  """A plan whose step takes a second of memory traffic, unless told otherwise."""
  config = dict(name="small", batches=dict(tokens=num_chips, max_length=8), mesh=dict(data=-1))
  rows = {"all-reduce": dict(sent_bytes=sent_bytes)}
  step = dict(
    rows=rows_a_chip * num_chips,
    length=8,
    refused="",
    flops=0,
    hbm_bytes=hbm_bytes,
    collectives=rows,
  )
  return dict(chip="v5e", num_chips=num_chips, config=config, steps=[step]) | changes


def test_as_much_work_in_as_much_time_is_all_of_a_chip():
  found = [*efficiencies([plan_on(256), plan_on(4)])]
  assert [each.plan["num_chips"] for each in found] == [4, 256]
  assert [(each.least, each.one_by_one, each.fewest) for each in found] == [(1, 1, 4)] * 2


def test_what_is_sent_counts_beside_or_after_the_rest():
  """A second over the links of a ring: nothing where it goes on beside, half where it does not."""
  second = 2 * 50e9
  (_, found) = efficiencies([plan_on(4), plan_on(16, sent_bytes=second)])
  assert (found.least, found.one_by_one) == (1, 0.5)
  (_, found) = efficiencies([plan_on(4), plan_on(16, sent_bytes=4 * second)])
  assert (found.least, found.one_by_one) == (0.25, 0.2)


def test_more_tokens_in_as_much_time_are_more_than_all():
  (_, found) = efficiencies([plan_on(4), plan_on(16, rows_a_chip=32)])
  assert found.least == 2


@pytest.mark.parametrize(
  "other",
  [
    dict(chip="v5p"),
    dict(effort="least"),
    dict(config=dict(batches=dict(max_length=9))),
    dict(steps=[plan_on(16)["steps"][0] | dict(num_kernels=3)]),
    dict(steps=[dict(refused="Used 20G of 15.75G hbm")]),
    dict(num_chips=4),
  ],
)
def test_only_alike_plans_are_compared(other):
  assert not [*efficiencies([plan_on(4), plan_on(16) | other])]


def test_a_plan_older_than_the_loss_of_a_key_is_compared():
  older = plan_on(16)
  older["config"]["data"] = dict(embedded=dict(seed=0, train_size=20_000))
  newer = plan_on(4)
  newer["config"]["data"] = dict(embedded=dict(train_size=20_000))
  assert len([*efficiencies([newer, older])]) == 2


def test_between_slices_there_is_another_network():
  """Of v5e a pod of 256 chips has 6.4 Tbit/s, in all."""
  plan = plan_on(32)
  plan["steps"][0]["collectives"][ACROSS] = dict(sent_bytes=6.4e12 / 8 / 256)
  assert estimate(plan, plan["steps"][0]) == (0, 1, 0, 1)
