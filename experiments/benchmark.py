r"""Measures what attention costs: every implementation and its peers, beside jax.nn's attention.

  python -m experiments.benchmark --lengths=512,1024 --implementations=chunked,per_position
  python -m experiments.benchmark --peers=all --memory_lengths=1024,4096,16384,65536 --out=results
  python -m experiments.benchmark --out=results --lengths=   # measures nothing, writes the report

All run in turn in one process, on as many threads as there are cores. Each is timed in pairs with
jax.nn.dot_product_attention without relations, which goes first every other time; a ratio is of
two neighbours in time. jax.nn stands there twice: the ratio of its two runs is the noise. Those
that never hold [T, S] weights are also timed against themselves without relations, and against
`per_position` and `flex_attention`. What cannot do a call, or needs more memory than there is, is
left out, and the report says why.

Keys and values have relations; float32 on CPUs, bfloat16 elsewhere. Writes
OUT/attention/NAME.json with every single time, a picture beside it, and OUT/attention.md, a report
of all the machines whose .json are there.
"""

import itertools
import json
import pathlib
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from experiments import attention_report, command, contestants
from experiments.contestants import AGAIN, FUSED, STOCK, Case, Contestant, Prepared
from experiments.torch_peers import TORCH_PEERS
from relpos_jax.attention.choice import IMPLEMENTATIONS
from relpos_jax.errors import InputError
from relpos_jax.evaluation.cost import Pair, compare, run_time
from relpos_jax.training.workdir import environment

PEERS: Mapping[str, Contestant] = contestants.JAX_PEERS | TORCH_PEERS
_USUAL = ",".join(name for name in IMPLEMENTATIONS if name != "reference")
_CAUSAL = {"no": [False], "yes": [True], "both": [False, True]}
_PASSES = {"forward": [False], "backward": [True], "both": [False, True]}

FLAGS = dict(
  lengths=command.Flag("32,128,512,1024,4096", "tokens a sequence, separated by commas"),
  memory_lengths=command.Flag(
    "", "lengths at which one sequence is compiled for its memory, and nothing runs"
  ),
  implementations=command.Flag(_USUAL, f"all, or some of {','.join(IMPLEMENTATIONS)}"),
  peers=command.Flag("all", f"all, none, or some of {','.join(PEERS)}"),
  causal=command.Flag("both", "no, yes or both"),
  passes=command.Flag("both", "forward, backward (and forward) or both"),
  repetitions=command.Flag(20, "of every pair"),
  tokens=command.Flag(4096, "in a batch, whatever their length"),
  heads=command.Flag(8, "of queries, keys and values"),
  width=command.Flag(64, "of a head"),
  max_distance=command.Flag(16, "k: tables have 2 k + 1 rows"),
  out=command.Flag("runs/benchmark", "the folder to write to"),
  name=command.Flag("", "of this machine's files; by default its device's"),
)


def main(
  lengths: str,
  memory_lengths: str,
  implementations: str,
  peers: str,
  causal: str,
  passes: str,
  repetitions: int,
  tokens: int,
  heads: int,
  width: int,
  max_distance: int,
  out: str,
  name: str,
) -> None:
  """Checks, compiles, measures, and writes the results after each case."""
  shape = dict(heads=heads, width=width, max_distance=max_distance)
  for flag, number, least in [
    *(("repetitions", repetitions, 1), ("tokens", tokens, 1), ("heads", heads, 1)),
    *(("width", width, 1), ("max_distance", max_distance, 0)),
  ]:
    if number < least:
      raise InputError(f"--{flag} is {number}; want at least {least}")
  shape["dtype"] = "float32" if jax.default_backend() == "cpu" else "bfloat16"
  kinds = _kinds(causal, passes)
  batches = [(_batch(length, tokens), length) for length in _numbers("lengths", lengths)]
  alone = [(1, length) for length in _numbers("memory_lengths", memory_lengths)]
  cases, memory_cases = (
    [Case(*size, **shape, **kind) for size in sizes for kind in kinds] for sizes in (batches, alone)
  )
  entrants = _entrants(
    _names("implementations", implementations, IMPLEMENTATIONS), _names("peers", peers, PEERS)
  )
  folder = _folder(out)
  if not cases and not memory_cases:
    attention_report.write(pathlib.Path(out))
    return
  results = dict(
    environment=environment(),
    settings=dict(tokens=tokens, repetitions=repetitions) | shape,
    contestants={
      name: dict(relations=entrant.relations, what=entrant.what)
      for name, entrant in entrants.items()
    },
    cases=[],
    memory=[],
  )
  file = folder / f"{name or _slug(jax.devices()[0].device_kind)}.json"
  for case in memory_cases:
    results["memory"].append(case._asdict() | dict(contestants=_memory(case, entrants)))
  for record in _measure(cases, entrants, repetitions):
    results["cases"].append(record)
    file.write_text(json.dumps(results) + "\n", encoding="utf-8")
  file.write_text(json.dumps(results) + "\n", encoding="utf-8")
  attention_report.write(pathlib.Path(out))


# The user's words --------------------------------------------------------------------------------


def _numbers(flag: str, text: str) -> list[int]:
  words = text.split(",") if text else []
  for word in words:
    if not re.fullmatch("0*[1-9][0-9]*", word):
      raise InputError(f"--{flag}: {word!r} is no length; want numbers such as 512,1024")
  return [int(word) for word in words]


def _batch(length: int, tokens: int) -> int:
  if tokens % length:
    raise InputError(f"--lengths: {length} does not divide --tokens={tokens}; change one of them")
  return tokens // length


def _names(flag: str, text: str, known: Mapping[str, Any]) -> list[str]:
  if text in ("all", "none"):
    return list(known) if text == "all" else []
  for name in text.split(","):
    if name not in known:
      raise InputError(f"--{flag}: unknown {name!r}; want all, none or some of {', '.join(known)}")
  return list(dict.fromkeys(text.split(",")))


def _kinds(causal: str, passes: str) -> list[dict[str, bool]]:
  for flag, word, known in (("causal", causal, _CAUSAL), ("passes", passes, _PASSES)):
    if word not in known:
      raise InputError(f"--{flag} is {word!r}; want {', '.join(known)}")
  return [
    dict(is_causal=is_causal, backward=backward)
    for backward, is_causal in itertools.product(_PASSES[passes], _CAUSAL[causal])
  ]


def _folder(out: str) -> pathlib.Path:
  folder = pathlib.Path(out) / "attention"
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise InputError(f"cannot use {folder} ({error.strerror}): give another --out") from error
  return folder


def _slug(device_kind: str) -> str:
  return re.sub("[^a-z0-9]+", "-", device_kind.lower()).strip("-")


# Contestants -------------------------------------------------------------------------------------


def _entrants(implementations: Sequence[str], peers: Sequence[str]) -> dict[str, Contestant]:
  """By name: jax.nn's first, then ours, with and without relations, then the peers."""
  entrants = {STOCK: contestants.stock(), AGAIN: contestants.stock()}
  for name in implementations:
    entrants[name] = contestants.implementation(name)
    if name in FUSED:
      entrants[_bare(name)] = contestants.without_relations(name)
  return entrants | {name: PEERS[name] for name in peers}


def _bare(name: str) -> str:
  return f"{name} (no relations)"


def pairs_of(names: Sequence[str]) -> list[Pair]:
  """All against jax.nn; the fused ones also against what they should be held against."""
  pairs = [(name, STOCK) for name in names if name != STOCK]
  for name in FUSED:
    others = (_bare(name), "per_position", "flex_attention") if name in names else ()
    pairs += [(name, other) for other in others if other in names]
  return pairs


def _memory(case: Case, entrants: Mapping[str, Contestant]) -> dict[str, Any]:
  rows = {}
  for name, entrant in entrants.items():
    _say(f"compiling for its memory: {describe(case)}: {name}")
    if entrant.runs_to_prepare:
      rows[name] = _row(refused="its memory is not known before it runs")
    elif name != AGAIN:
      prepared = _prepare(entrant, case)
      rows[name] = prepared if isinstance(prepared, dict) else _row(prepared.temporary_bytes)
  return rows


def _prepare(entrant: Contestant, case: Case) -> Prepared | dict[str, Any]:
  """What is ready to run, or the row that says why it is not."""
  try:
    return entrant.prepare(case)
  except RuntimeError as error:  # NotImplementedError and lack of memory among them
    return _row(refused=_first_line(error))


def _ready(entrant: Contestant, case: Case) -> tuple[dict[str, Any], Prepared | None, float]:
  """A row, and where the contestant can run what runs, and the seconds of its first run."""
  prepared = _prepare(entrant, case)
  if isinstance(prepared, dict):
    return prepared, None, 0.0
  free = _free_bytes()
  if prepared.bytes_needed > free:
    return (
      _row(
        prepared.temporary_bytes,
        f"it needs {prepared.bytes_needed / 2**30:.1f} GiB of {free / 2**30:.1f} GiB",
      ),
      None,
      0.0,
    )
  try:
    return _row(prepared.temporary_bytes), prepared, run_time(prepared.run)
  except RuntimeError as error:
    return _row(prepared.temporary_bytes, _first_line(error)), None, 0.0


def _row(temporary_bytes: int | None = None, refused: str | None = None) -> dict[str, Any]:
  return dict(temporary_bytes=temporary_bytes, refused=refused)


def _first_line(error: RuntimeError) -> str:
  """The first line of an error, without what the row says anyway."""
  line = (str(error).splitlines() or [type(error).__name__])[0]
  return line.partition("cannot do this call: ")[2] or line


def _free_bytes() -> float:
  """What a computation may take here; no limit where the machine does not say."""
  stats = jax.devices()[0].memory_stats()
  if stats and "bytes_limit" in stats:
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
  meminfo = pathlib.Path("/proc/meminfo")
  found = meminfo.exists() and re.search(r"MemAvailable:\s*(\d+) kB", meminfo.read_text())
  return 1024 * int(found[1]) if found else float("inf")


# Measuring ---------------------------------------------------------------------------------------


def _measure(cases: Sequence[Case], entrants: Mapping[str, Contestant], repetitions: int):
  """Prepares all cases, so that the time left is known, then times them; yields a record each."""
  ready, plans = [], []
  for number, case in enumerate(cases):
    _say(f"compiling {number + 1}/{len(cases)}: {describe(case)}")
    rows = {name: _ready(entrant, case) for name, entrant in entrants.items()}
    ready.append(rows)
    pairs = pairs_of([name for name, (_, prepared, _) in rows.items() if prepared])
    seconds = repetitions * sum(rows[name][2] for pair in pairs for name in pair)
    plans.append((pairs, seconds))
  for number, (case, rows, (pairs, _)) in enumerate(zip(cases, ready, plans, strict=True)):
    progress = _Progress(f"{number + 1}/{len(cases)}: {describe(case)}", plans[number:])
    functions = {name: prepared.run for name, (_, prepared, _) in rows.items() if prepared}
    times = compare(functions, pairs, repetitions, progress.tick)
    yield case._asdict() | dict(
      contestants={name: row for name, (row, _, _) in rows.items()},
      pairs=[dict(name=pair[0], against=pair[1]) | t._asdict() for pair, t in times.items()],
    )


def describe(case: Case) -> str:
  kind = attention_report.describe_kind(case.is_causal, case.backward)
  return f"T = {case.length:,}, {kind}"


class _Progress:
  """Says now and then how long the plans, this case's first, will still take."""

  def __init__(self, words: str, plans):
    self._words, self._left = words, sum(seconds for _, seconds in plans)
    self._said = 0.0

  def tick(self, seconds: float) -> None:
    self._left = max(0.0, self._left - seconds)
    if time.monotonic() - self._said > 10:
      self._said = time.monotonic()
      minutes, rest = divmod(round(self._left), 60)
      _say(f"measuring {self._words}; about {minutes}:{rest:02} left in all")


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
  command.run(main, FLAGS)
