"""Other devices and other numbers of processes at each start: the same parameters and data."""

import pathlib
import random
from collections.abc import Iterator

from experiments.faults.outcome import metrics, state_digests
from experiments.faults.poisoned import read_order
from experiments.faults.subject import Subject
from experiments.faults.tries import Try, joined

_LEG = 10  # steps at each place
_CLOSE = 1e-4  # losses differ by what sums in another order round
_CHAINS = {"devices": (8, 4, 2, 8), "processes": (2, 1, 2)}


def devices(subject: Subject, rng: random.Random, tries: int) -> Iterator[Try]:
  """Each leg starts with a batch that is skipped: what was restored is saved again as it is.

  `tries`: 1 makes the first move of each chain only.
  """
  whole = subject.folder / "one-place"
  first_batches = [leg * _LEG for leg in range(1, max(map(len, _CHAINS.values())))]
  _train(subject, whole, 1, 8, min(tries, len(first_batches)), first_batches)
  for kind, chain in _CHAINS.items():
    for leg, number in enumerate(chain[: tries + 1]):
      workdir = subject.folder / f"moved-{kind}"
      processes, devices = (1, number) if kind == "devices" else (number, 1)
      _train(subject, workdir, processes, devices, leg, first_batches)
      if leg:
        yield _compared(workdir, whole, leg, f"{chain[leg - 1]} -> {number} {kind}")


def _train(
  subject: Subject,
  workdir: pathlib.Path,
  processes: int,
  devices: int,
  leg: int,
  poisoned: list[int],
) -> None:
  """To the end of a leg; saves after its first step, and its last."""
  flags = [
    f"--config.training.num_steps={(leg + 1) * _LEG}",
    f"--config.training.save_every={leg * _LEG + 1}",
    "--config.training.keep_checkpoints=20",
    f"--batches={','.join(map(str, poisoned))}",
    f"--order={_order(workdir)}",
  ]
  place = dict(processes=processes, devices=devices)
  with subject.launched(workdir, *flags, **place, program="faults.poisoned") as running:
    if running.wait():
      raise RuntimeError(f"training failed:\n{running.log()}")


def _order(workdir: pathlib.Path) -> pathlib.Path:
  return workdir.with_name(f"{workdir.name}.order")


def _compared(workdir: pathlib.Path, whole: pathlib.Path, leg: int, what: str) -> Try:
  """What a leg restored and went on with, beside the run that never moved."""
  saved, again = (state_digests(workdir, leg * _LEG + more) for more in (0, 1))
  ours, theirs = (_losses(folder, (leg + 1) * _LEG) for folder in (workdir, whole))
  same_steps = [*ours] == [*theirs]
  apart = max(abs((ours[s] or 0) - (theirs[s] or 0)) for s in ours) if same_steps else -1
  order, wanted = read_order(_order(workdir)), read_order(_order(whole))
  numbers = {number for number, _ in order}
  problems = {
    "the state is another than was saved": saved != again,
    "the data are others": not order <= wanted or not numbers >= {*range((leg + 1) * _LEG)},
    "the steps are others": not same_steps,
    f"losses are {apart:.2g} apart": apart > _CLOSE,
  }
  return Try(what, joined(problems), {"losses apart": apart})


def _losses(workdir: pathlib.Path, num_steps: int) -> dict[int, float | None]:
  """By step; None where one was skipped."""
  lines = [line for line in metrics(workdir) if "loss" in line and line["step"] <= num_steps]
  return {line["step"]: line["loss"] for line in lines}
