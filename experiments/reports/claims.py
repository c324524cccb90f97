"""Sentences about which row is above which, made from the numbers, none inside the spread."""

import itertools
from collections.abc import Callable, Mapping, Sequence

from experiments.reports import markdown
from relpos_jax.evaluation.statistics import Comparison

Compare = Callable[[str, str], Comparison]
_Pairs = list[tuple[str, str]]


def ordering(paper: Mapping[str, float], compare: Compare) -> str:
  """Whether rows that the paper has at different BLEU are ordered alike here, and its equals equal.

  Args:
    paper: its BLEU by row, of rows that are here.
    compare: two rows of ours.
  """
  pairs = list(itertools.combinations(sorted(paper, key=lambda row: -paper[row]), 2))
  apart = [pair for pair in pairs if paper[pair[0]] > paper[pair[1]]]
  equal = [pair for pair in pairs if paper[pair[0]] == paper[pair[1]]]
  there, reverse, hidden = _sort(apart, compare)
  broken, _ = _clear(equal, compare)
  parts = [
    _count(there, "beyond the spread", compare),
    _count(reverse, "the other way round", compare),
    _count(hidden, "inside the spread", compare),
  ]
  said = f"{_verdict(there, reverse, hidden)}{_breach(broken, equal)}. "
  said += f"Of its {_number(apart, 'difference')}, "
  said += ", ".join(part for part in parts if part) + "."
  if not apart:
    said = "No two of these rows are apart in the paper."
  return f"{said} {_equals(broken, equal, compare)}".strip()


def _verdict(there: _Pairs, reverse: _Pairs, hidden: _Pairs) -> str:
  if reverse:
    return "The paper's ordering does not hold here"
  if not there:
    return "Whether the paper's ordering holds is not to be seen in these runs"
  return f"The paper's ordering holds{' as far as the spread lets it be seen' if hidden else ''}"


def _breach(broken: _Pairs, equal: _Pairs) -> str:
  """The end of a verdict on an ordering: what the paper has equal and is not so here.

  >>> _breach([("a", "b")], [("a", "b")]), _breach([("a", "b")], 2 * [("a", "b")])
  ('; its equality does not hold', '; 1 of its 2 equalities does not hold')
  """
  if not broken:
    return ""
  which = "its equality" if len(equal) == 1 else f"{len(broken)} of its {len(equal)} equalities"
  return f"; {which} {'does' if len(broken) == 1 else 'do'} not hold"


def _equals(broken: _Pairs, equal: _Pairs, compare: Compare) -> str:
  if not equal:
    return ""
  told = _count(broken, "broken beyond the spread", compare) or "none is broken beyond the spread"
  return f"Of its {_number(equal, 'equality')}, {told}."


def differences(rows: Sequence[str], compare: Compare) -> str:
  """Which of the rows are apart: the rest of a sentence."""
  clear, hidden = _clear(list(itertools.combinations(rows, 2)), compare)
  if not clear:
    return "no two rows are apart beyond the spread."
  rest = f"; inside it: {_number(hidden, 'other pair')}" if hidden else ""
  return f"beyond the spread: {_list(clear, compare)}{rest}."


def no_gain(first: str, second: str, compare: Compare) -> str:
  """Whether `first` is above `second`, of which the paper says that it is not."""
  comparison = compare(first, second)
  difference = comparison.difference
  if difference.half_width is None:
    told = "may or may not be above it: the paper says it is not"
  elif comparison.is_clear() and difference.mean > 0:
    told = "is above it beyond the spread, unlike in the paper"
  else:
    told = "is not above it beyond the spread, as in the paper"
  return f"Against {second}, {first} {told} ({markdown.signed(difference)})."


def lone_seeds(seeds: Mapping[str, int]) -> str:
  """Of which rows there is one seed only: they have no interval, and no claim is made."""
  lone = [row for row, number in seeds.items() if number == 1]
  if not lone:
    return ""
  which = "all rows" if len(lone) == len(seeds) else "; ".join(lone)
  return f"One seed of {which}: no interval, so their differences count as inside the spread."


def _clear(pairs: _Pairs, compare: Compare) -> tuple[_Pairs, _Pairs]:
  """Pairs that are apart beyond the spread, the higher first, and the others."""
  above, below, hidden = _sort(pairs, compare)
  return above + [(second, first) for first, second in below], hidden


def _sort(pairs: _Pairs, compare: Compare) -> tuple[_Pairs, _Pairs, _Pairs]:
  """Pairs of which the first is clearly above, those of which the second is, and the others."""
  above, below, hidden = [], [], []
  for pair in pairs:
    comparison = compare(*pair)
    of_its_kind = above if comparison.difference.mean > 0 else below
    (of_its_kind if comparison.is_clear() else hidden).append(pair)
  return above, below, hidden


def _count(pairs: _Pairs, where: str, compare: Compare) -> str:
  if not pairs:
    return ""
  return f"{len(pairs)} {'is' if len(pairs) == 1 else 'are'} {where} ({_list(pairs, compare)})"


def _list(pairs: _Pairs, compare: Compare) -> str:
  return "; ".join(f"{a} over {b}: {markdown.signed(compare(a, b).difference)}" for a, b in pairs)


def _number(pairs: _Pairs, noun: str) -> str:
  """
  >>> _number([("a", "b")], "pair"), _number([], "equality")
  ('1 pair', '0 equalities')
  """
  if len(pairs) == 1:
    return f"1 {noun}"
  return f"{len(pairs)} {noun[:-1]}ies" if noun.endswith("y") else f"{len(pairs)} {noun}s"
