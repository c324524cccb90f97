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

import importlib.metadata
import importlib.util
import itertools
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax

from experiments import command
from experiments.benchmarks import measurement, tables
from experiments.benchmarks.contestants import Case
from experiments.benchmarks.measurement import PEERS, Effort
from relpos_jax.attention.choice import IMPLEMENTATIONS
from relpos_jax.errors import InputError
from relpos_jax.training.workdir import environment, write_whole

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
  repetitions=command.Flag(20, "of every pair, at least"),
  seconds=command.Flag(20, "that a case is measured, by up to 10 times as many repetitions"),
  tokens=command.Flag(4096, "in a batch, whatever their length"),
  heads=command.Flag(8, "of queries, keys and values"),
  width=command.Flag(64, "of a head"),
  max_distance=command.Flag(16, "k: tables have 2 k + 1 rows"),
  out=command.Flag("runs/benchmark", "the folder to write to"),
  name=command.Flag("", "of this machine's files; by default its device's"),
)


def main(**values: Any) -> None:
  """Checks the flags' values, then compiles, measures, and writes the results after each case."""
  # PyTorch needs room on the same GPU; read when JAX first looks for devices.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  values["dtype"] = "float32" if jax.default_backend() == "cpu" else "bfloat16"
  _check_numbers(values)
  cases, memory_cases = _cases(values)
  entrants = measurement.entrants(
    _names("implementations", values["implementations"], IMPLEMENTATIONS),
    _names("peers", values["peers"], PEERS),
  )
  folder = command.make_folder(pathlib.Path(values["out"], "attention"), "out")
  file = folder / f"{values['name'] or _slug(jax.devices()[0].device_kind)}.json"
  if cases or memory_cases:
    effort = Effort(values["repetitions"], values["seconds"])
    results = dict(environment=_environment(), settings=values)
    for measured in measurement.measure(cases, memory_cases, entrants, effort):
      write_whole(file, json.dumps(results | measured) + "\n")
  tables.write(pathlib.Path(values["out"]))


def _environment() -> dict[str, Any]:
  """With PyTorch's version, which no other command needs."""
  where, found = environment(), importlib.util.find_spec("torch")
  where["packages"]["torch"] = importlib.metadata.version("torch") if found else None
  return where


def _check_numbers(values: Mapping[str, Any]) -> None:
  """Before anything is compiled."""
  may_be_zero = ("seconds", "max_distance")
  for flag in ("repetitions", "seconds", "tokens", "heads", "width", "max_distance"):
    least = 0 if flag in may_be_zero else 1
    if values[flag] < least:
      raise InputError(f"--{flag} is {values[flag]}; want at least {least}")


def _cases(values: Mapping[str, Any]) -> tuple[list[Case], list[Case]]:
  """Those to time, of as many tokens each, and those of one sequence, to compile for memory."""
  tokens = values["tokens"]
  flags = ("lengths", "memory_lengths")
  lengths, alone = (command.lengths(flag, values[flag]) for flag in flags)
  same = {name: values[name] for name in ("heads", "width", "max_distance", "dtype")}
  kinds = _kinds(values["causal"], values["passes"])
  build = lambda sizes: [Case(*size, **same, **kind) for size in sizes for kind in kinds]
  batches = [(_batch(length, tokens), length) for length in lengths]
  return build(batches), build([(1, length) for length in alone])


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


def _slug(device_kind: str) -> str:
  return re.sub("[^a-z0-9]+", "-", device_kind.lower()).strip("-")


if __name__ == "__main__":
  command.run(main, FLAGS)
