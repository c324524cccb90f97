"""What Shaw et al. 2018 report, beside which the sweeps' tables stand."""

from collections.abc import Mapping
from typing import NamedTuple


class Published(NamedTuple):
  """One table: its title, which rows to compare, and the paper's columns of it.

  Each row is compared with that of `baselines`, or else with `baseline`. The columns are BLEU by
  row. All order the rows alike; ours is held against the first. `no_gain` are pairs of rows of
  which the paper says in words that the first is not above the second.
  """

  title: str
  baseline: str
  baselines: Mapping[str, str] = {}
  columns: Mapping[str, Mapping[str, float]] = {}
  no_gain: tuple[tuple[str, str], ...] = ()


def published(sweep: str) -> Published | None:
  """The table of a sweep, whose name may go on after it, as in "table1-published".

  >>> published("table1-short").title
  'Table 1: relative positions, sinusoids, both, none (short)'
  """
  name, _, variant = sweep.partition("-")
  table = _TABLES.get(name)
  return table and table._replace(title=table.title + (f" ({variant})" if variant else ""))


def in_order(sweeps: list[str]) -> list[str]:
  """As in the paper, and then all others by name.

  >>> in_order(["lengths", "mine", "table2", "table1-short"])
  ['table1-short', 'table2', 'lengths', 'mine']
  """
  names = [*_TABLES]
  place = lambda name: names.index(name) if name in names else len(names)
  return sorted(sweeps, key=lambda sweep: (place(sweep.partition("-")[0]), sweep))


def _positions(relative: float, sinusoidal: float) -> dict[str, float]:
  return dict(relative=relative, sinusoidal=sinusoidal)


# Of the base model, whose tables are all of them but one column.
BUDGET = "100,000 updates of 32,768 tokens"

# Table 1 is of newstest2014, Tables 2 and 3 of newstest2013.
_TABLES = {
  "table1": Published(
    "Table 1: relative positions, sinusoids, both, none",
    baseline="sinusoidal",
    columns={
      "paper, EN-DE base": _positions(26.8, 26.5),
      "paper, EN-DE big": _positions(29.2, 27.9),
      "paper, EN-FR base": _positions(38.7, 38.2),
      "paper, EN-FR big": _positions(41.5, 41.2),
    },
    no_gain=(("both", "relative"),),
  ),
  "table2": Published(
    "Table 2: the clipping distance k",
    baseline="k=16",
    columns={
      "paper, EN-DE base": {
        **{"k=0": 12.5, "k=1": 25.5, "k=2": 25.8, "k=4": 25.9},
        **{"k=16": 25.8, "k=64": 25.9, "k=256": 25.8},
      }
    },
  ),
  "table3": Published(
    "Table 3: relative vectors on keys, on values",
    baseline="keys and values",
    columns={
      "paper, EN-DE base": {"keys and values": 25.8, "keys": 25.8, "values": 25.3, "neither": 12.5}
    },
  ),
  "sharing": Published("Tables shared by heads, by layers", baseline="per head, per layer"),
  "beyond": Published(
    "Beyond the table: clip against zero",
    baseline="clip, k=16",
    baselines={"zero, k=4": "clip, k=4"},
  ),
  "lengths": Published("Lengths unseen in training", baseline="sinusoidal"),
}
