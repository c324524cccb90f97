"""Times every implementation of attention and its peers against jax.nn's attention."""

import functools
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import command
from experiments.benchmark import timing
from experiments.benchmark.timing import Program, Record
from experiments.errors import InputError
from experiments.evaluation.pictures import CostPanel, cost_curves
from experiments.evaluation.tables import column_table, markdown_table
from experiments.files import write_whole
from experiments.training.environment import environment
from relpos_jax import RelativePositions, dot_product_attention
from relpos_jax.attention import skew
from relpos_jax.attention.choice import IMPLEMENTATIONS
from relpos_jax.attention.inputs import gather_inputs

STOCK, AGAIN = "jax.nn", "jax.nn (again)"
BLOCKWISE = ("chunked", "pallas_gpu")  # never hold [T, S] weights
MASKS, PASSES = ("bidirectional", "causal"), ("forward", "backward")


class Case(NamedTuple):
  """A call to measure: B sequences of T tokens, N heads of width H, tables of 2 k + 1 rows."""

  batch: int
  length: int
  heads: int
  width: int
  max_distance: int
  dtype: str
  is_causal: bool
  backward: bool


class Contestant(NamedTuple):
  """An attention function, and the relations that it computes."""

  relations: str  # "keys and values", "keys" or "none"
  prepare: Callable[
    [Case], Program
  ]  # or raises RuntimeError with the reason why it cannot run


def main(**values: Any) -> None:
  """Measures all cases, writes the raw results after each, and rewrites the page."""
  # PyTorch needs memory on the same GPU; JAX reads this when it first looks for
  # devices.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  values["dtype"] = "float32" if jax.default_backend() == "cpu" else "bfloat16"
  cases = _cases(values)
  implementations = _names(
    "implementations", values["implementations"], IMPLEMENTATIONS
  )
  entrants = _entrants(implementations, _names("peers", values["peers"], PEERS))
  folder = command.make_folder(pathlib.Path(values["out"], "attention"), "out")
  device = re.sub("[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-")
  path = folder / f"{values['name'] or device}.json"
  results = dict(environment=environment("torch"), settings=values, cases=[])
  results["contestants"] = {
    name: dict(relations=of.relations) for name, of in entrants.items()
  }
  for case in cases:
    print(f"T = {case.length:,}, {_kind(case._asdict())}", file=sys.stderr)
    rows, functions = prepare(case, entrants)
    pairs = time_pairs(functions, pairs_of([*functions]), values["repetitions"])
    results["cases"].append(case._asdict() | dict(contestants=rows, pairs=pairs))
    write_whole(path, json.dumps(results) + "\n")
  timing.rewrite_page(folder, draw_block)


def _cases(values: Mapping[str, Any]) -> list[Case]:
  passes = _names("passes", values["passes"], PASSES)
  masks = _names("masks", values["masks"], MASKS)
  tokens = values["tokens"]
  for word in values["lengths"].split(","):
    if not word.isdecimal() or not int(word) or tokens % int(word):
      raise InputError(
        f"--lengths: {word!r} does not divide --tokens={tokens}; change one of them"
      )
  same = [values[name] for name in ("heads", "width", "max_distance", "dtype")]
  return [
    Case(tokens // length, length, *same, mask == "causal", name == "backward")
    for length in map(int, values["lengths"].split(","))
    for name in passes
    for mask in masks
  ]


def _names(flag: str, text: str, known: Collection[str]) -> list[str]:
  if text in ("all", "usual", "none"):
    left_out = dict(all=(), usual=("reference",), none=known)[text]
    return [name for name in known if name not in left_out]
  for name in text.split(","):
    if name not in known:
      raise InputError(
        f"--{flag}: unknown {name!r}; want all, none or some of {', '.join(known)}"
      )
  return list(dict.fromkeys(text.split(",")))


# Contestants
# --------------------------------------------------------------------------------------


def _compiled(
  attention, backend: str | None = None, **options: Any
) -> Callable[[Case], Program]:
  """Returns the `prepare` of attention(case, query, key, value, relations, **options)."""

  def prepare(case: Case) -> Program:
    if backend not in (None, jax.default_backend()):
      raise NotImplementedError(f"it needs a {backend.upper()}")
    function = functools.partial(attention, case, **options)

    def both(cotangent, *arguments):
      result, pull_back = jax.vjp(function, *arguments)
      return result, pull_back(cotangent)

    shapes = jax.eval_shape(functools.partial(arguments.__wrapped__, case))
    compiled = jax.jit(both if case.backward else function).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    sizes = (
      memory.temp_size_in_bytes,
      memory.argument_size_in_bytes,
      memory.output_size_in_bytes,
    )
    return Program(lambda: compiled(*arguments(case)), sizes[0], sum(sizes))

  return prepare


@functools.lru_cache(maxsize=1)
def arguments(case: Case) -> tuple:
  """Returns random query, key, value and relations, after a cotangent if there is a backward."""
  keys = jax.random.split(jax.random.key(0), 6)
  shape = case.batch, case.length, case.heads, case.width
  tokens = [
    jax.random.normal(key, shape, case.dtype) for key in keys[: 3 + case.backward]
  ]
  tables = [
    jax.random.normal(key, (2 * case.max_distance + 1, case.width)) for key in keys[4:]
  ]
  return *tokens, RelativePositions(*tables)


def _ours(case, query, key, value, relations, *, related=True, **options):
  options |= dict(is_causal=case.is_causal, relations=relations if related else None)
  return dot_product_attention(query, key, value, **options)


def _jax_nn(case, query, key, value, relations, **options):
  return jax.nn.dot_product_attention(
    query, key, value, is_causal=case.is_causal, **options
  )


def _dense_bias(case, query, key, value, relations, **options):
  """Computes the relative key term of all pairs as jax.nn's bias."""
  inputs = gather_inputs(query, key, value, relations=relations)
  bias = (skew.relative_logits(inputs, *inputs.relations) * inputs.scale).astype(
    query.dtype
  )
  return _jax_nn(case, query, key, value, None, bias=bias, **options)


def _torch_sdpa(case: Case) -> Program:
  """Returns PyTorch's scaled_dot_product_attention, without relations."""
  # Threads that wait by spinning slow the next JAX call down two to four times.
  os.environ.setdefault("OMP_WAIT_POLICY", "passive")
  try:
    import torch
    from torch.nn.functional import scaled_dot_product_attention
  except ImportError as error:
    remedy = "PyTorch is not installed: pip install 'relpos_jax[benchmark]'"
    raise NotImplementedError(remedy) from error

  if hasattr(os, "sched_getaffinity"):
    torch.set_num_threads(len(os.sched_getaffinity(0)))
  backend = jax.default_backend()
  if backend != "cpu" and not (backend == "gpu" and torch.cuda.is_available()):
    raise NotImplementedError(
      f"this PyTorch, {torch.__version__}, finds no {backend.upper()}"
    )
  device = "cpu" if backend == "cpu" else "cuda"
  *tokens, _ = arguments(case)
  options = dict(device=device, dtype=getattr(torch, case.dtype))
  tensors = [  # [B, N, T, H]
    torch.tensor(np.asarray(array.swapaxes(1, 2), "f4")).to(**options)
    for array in tokens
  ]
  cotangent, *inputs = [None] * (not case.backward) + tensors
  inputs = [tensor.requires_grad_(case.backward) for tensor in inputs]

  def run():
    result = scaled_dot_product_attention(*inputs, is_causal=case.is_causal)
    if case.backward:
      result = torch.autograd.grad(result, inputs, cotangent)
    if device == "cuda":
      torch.cuda.synchronize()
    return result

  if device == "cpu":  # it may hold the scores [B, N, T, S]
    return Program(run, None, 4 * case.batch * case.heads * case.length**2)
  run()  # prepares the kernel
  torch.cuda.reset_peak_memory_stats()
  before = torch.cuda.memory_allocated()
  run()
  return Program(run, torch.cuda.max_memory_allocated() - before, 0)


PEERS = dict(
  dense_bias=Contestant("keys", _compiled(_dense_bias)),
  cudnn=Contestant("none", _compiled(_jax_nn, "gpu", implementation="cudnn")),
  cudnn_dense_bias=Contestant(
    "keys", _compiled(_dense_bias, "gpu", implementation="cudnn")
  ),
  torch_sdpa=Contestant("none", _torch_sdpa),
)


def _entrants(
  implementations: Sequence[str], peers: Sequence[str]
) -> dict[str, Contestant]:
  """Returns contestants by name: jax.nn twice, ours, blockwise ones without relations, peers."""
  stock = Contestant("none", _compiled(_jax_nn))
  found = {STOCK: stock, AGAIN: stock}
  for name in implementations:
    ours = functools.partial(
      _compiled, _ours, IMPLEMENTATIONS[name].device, implementation=name
    )
    found[name] = Contestant("keys and values", ours())
    if name in BLOCKWISE:
      found[f"{name} (no relations)"] = Contestant("none", ours(related=False))
  return found | {name: PEERS[name] for name in peers}


# Measurement
# --------------------------------------------------------------------------------------


def prepare(case: Case, entrants: Mapping[str, Contestant]) -> tuple[dict, dict]:
  """Returns a row for each entrant: its memory, or the reason that it is left out.

  Also returns a function for each entrant that has run the case.
  """
  rows, functions = {}, {}
  for name, entrant in entrants.items():
    row = rows[name] = dict(temporary_bytes=None, refused=None)
    try:
      program = entrant.prepare(case)
      row["temporary_bytes"] = program.temporary_bytes
      needed, free = program.bytes_needed / 2**30, timing.free_bytes() / 2**30
      if needed > free:
        raise RuntimeError(f"it needs {needed:.1f} GiB of {free:.1f} GiB")
      jax.block_until_ready(program.run())  # may compile
      functions[name] = program.run
    except RuntimeError as error:  # also NotImplementedError and lack of memory
      reason = (str(error) or type(error).__name__).splitlines()[0]
      row["refused"] = reason.partition("cannot do this call: ")[2] or reason
  return rows, functions


def time_pairs(
  functions: Mapping[str, Callable[[], Any]],
  pairs: Sequence[tuple[str, str]],
  repetitions: int,
) -> list[dict[str, Any]]:
  """Returns the seconds of both functions of each pair in every repetition.

  A machine's speed drifts, so only neighbours in time are compared; they take turns to
  be first.
  """
  timed = [dict(name=a, against=b, seconds=[], against_seconds=[]) for a, b in pairs]
  for repetition in range(repetitions):
    for pair in timed:
      runs = [("against", "against_seconds"), ("name", "seconds")]
      for name, seconds in reversed(runs) if repetition % 2 else runs:
        pair[seconds].append(timing.run_time(functions[pair[name]]))
  return timed


def pairs_of(names: Sequence[str]) -> list[tuple[str, str]]:
  """Returns pairs of all with jax.nn, and of blockwise ones with their alternatives."""
  pairs = [(name, STOCK) for name in names if name != STOCK]
  pairs += [
    (x, of) for x in BLOCKWISE for of in (f"{x} (no relations)", "per_position")
  ]
  return [pair for pair in pairs if {*pair} <= {*names}]


# Page
# ---------------------------------------------------------------------------------------------


def draw_block(results: Record) -> str:
  """Draws a picture next to the raw results, and returns their block of the page."""
  settings, cases, contestants = (
    results[key] for key in ("settings", "cases", "contestants")
  )
  cases.sort(key=lambda case: case["length"])
  picture = results["path"].with_suffix(".png")
  peers = [
    name for name, of in contestants.items() if of["relations"] != "keys and values"
  ]
  cost_curves(_panels(results), peers, picture)
  parts = [
    timing.provenance(results, ("jax", "jaxlib", "torch")),
    f"{settings['dtype']}, N = {settings['heads']}, H = {settings['width']}, "
    f"k = {settings['max_distance']}, B T = {settings['tokens']:,}; "
    f"repetitions: {settings['repetitions']}.",
    f"![Time and memory over length](attention/{picture.name})",
  ]
  for title, cells in (("Time", _times), ("Temporary memory", _memory)):
    for kind in dict.fromkeys(map(_kind, cases)):
      columns = {
        f"T = {case['length']:,}": cells(case) for case in cases if _kind(case) == kind
      }
      names = dict.fromkeys(name for of in columns.values() for name in of)
      parts += [f"### {title}, {kind}", column_table("", names, columns)]
  rows = []
  for name, of in contestants.items():
    reasons = (case["contestants"].get(name, {}).get("refused") for case in cases)
    rows.append(
      [name, of["relations"], "; ".join(filter(None, dict.fromkeys(reasons)))]
    )
  header = ["", "relations", "reason for missing figures"]
  parts += ["### Contestants", markdown_table(header, rows)]
  return "\n\n".join(part.strip() for part in parts)


def _times(case: Record) -> dict[str, str]:
  """Returns jax.nn's median time, and the median and quartiles of each pair's ratio."""
  cells = {
    name: f"{x:,.1f} ms" for name, x in _milliseconds(case).items() if name == STOCK
  }
  for pair in case["pairs"]:
    low, median, high = _ratios(pair)
    other = "" if pair["against"] == STOCK else f" / {pair['against']}"
    cells[pair["name"] + other] = f"{median:.2f} ({low:.2f} to {high:.2f})"
  return cells


def _memory(case: Record) -> dict[str, str]:
  """Returns temporary memory, and in brackets its ratio to jax.nn's."""
  sizes = _mebibytes(case)
  return {name: f"{x:,.1f} MiB ({x / sizes[STOCK]:.3g})" for name, x in sizes.items()}


def _kind(case: Record) -> str:
  passes = "forward and backward" if case["backward"] else "forward"
  return f"{passes}, {'causal' if case['is_causal'] else 'bidirectional'}"


def _milliseconds(case: Record) -> dict[str, float]:
  """Returns jax.nn's median time, and its product with each median ratio, which drifts less."""
  if not (pairs := [pair for pair in case["pairs"] if pair["against"] == STOCK]):
    return {}
  stock = 1e3 * float(np.median([pair["against_seconds"] for pair in pairs]))
  return {STOCK: stock} | {pair["name"]: stock * _ratios(pair)[1] for pair in pairs}


def _ratios(pair: Record) -> list[float]:
  return timing.quartiles(np.divide(pair["seconds"], pair["against_seconds"]))


def _mebibytes(case: Record) -> dict[str, float]:
  sizes = {name: row["temporary_bytes"] for name, row in case["contestants"].items()}
  return {name: size / 2**20 for name, size in sizes.items() if size and name != AGAIN}


def _panels(results: Record) -> list[list[CostPanel]]:
  """Returns a row of panels for each mask, with the backward pass if it was measured."""
  cases, rows = results["cases"], []
  backward = any(case["backward"] for case in cases)
  for kind in sorted({_kind(x) for x in cases if x["backward"] == backward}):
    rows.append([])
    for measure, values in (
      ("milliseconds", _milliseconds),
      ("temporary memory, MiB", _mebibytes),
    ):
      points = {case["length"]: values(case) for case in cases if _kind(case) == kind}
      names = dict.fromkeys(
        name for of in points.values() for name in of if name != AGAIN
      )
      curves = {
        name: [(x, of[name]) for x, of in points.items() if name in of]
        for name in names
      }
      title = f"{kind}, B T = {results['settings']['tokens']:,}"
      rows[-1] += [CostPanel(title, measure, curves)] * bool(curves)
  return rows


MAINS = dict(attention=main)
