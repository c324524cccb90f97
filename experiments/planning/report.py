"""The page of plans, and the files that it is made of."""

import json
import pathlib
from collections.abc import Iterable, Sequence

from experiments.planning.scaling import Plan, effort
from experiments.planning.tables import tables
from relpos_jax.errors import InputError
from relpos_jax.training.workdir import short_commit

_INTRO = """Written by `python -m experiments.plan`: the training step as `experiments.train`
makes it, compiled by the TPU's own compiler for chips that are not there. **Nothing ran, no time
was measured.** All figures are of one chip and one step. Batches are of the shapes that mocked
lengths of sentences get, those of the longest sentences where there is one.
"""
_LEAST = """Plans marked *least effort* were compiled with the least of the compiler's effort
(JAX_EXEC_TIME_OPTIMIZATION_EFFORT=-1), in a fraction of its time: the same step, of which it fuses
other parts. Training compiles with full effort, unless that is set: memory and its traffic will
differ, so compare plans of one effort.
"""


def read(folder: pathlib.Path) -> list[Plan]:
  """The plans in a folder's files, by name.

  Raises:
    InputError: a file cannot be read, or is no plan.
  """
  plans = []
  for path in sorted(folder.glob("*.json")):
    try:
      plan = json.loads(path.read_text(encoding="utf-8"))
      if not isinstance(plan, dict) or "name" not in plan:
        raise ValueError("no plan")
    except (OSError, ValueError) as error:
      raise InputError(f"cannot read {path} ({error}): delete it, and plan again") from error
    plans.append(plan)
  return plans


def page(title: str, plans: Sequence[Plan]) -> str:
  """The Markdown page of some plans."""
  commands = "\n".join(plan["environment"]["command"] for plan in plans)
  least = [_LEAST] if any(effort(plan) == "least" for plan in plans) else []
  head = [f"# {title}\n", _INTRO, *least, *_versions(plans), f"```\n{commands}\n```\n"]
  parts = [*head, tables(plans)]
  return "\n".join(parts)


def _versions(plans: Iterable[Plan]) -> list[str]:
  versions = {
    (
      where["date"][:10],
      where["python"],
      *(where["packages"][name] for name in ("jax", "libtpu")),
      short_commit(where["git_commit"]),
    )
    for where in (plan["environment"] for plan in plans)
  }
  line = "{}, Python {}, jax {}, libtpu {}, commit {}.\n"
  return [line.format(*version) for version in sorted(versions)]
