"""Times attention, ours and that of other libraries, and compares it with jax.nn's."""

import concurrent.futures
import functools
import itertools
import json
import os
import pathlib
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from experiments import command
from experiments.benchmark import timing
from experiments.benchmark.schemes import SCHEMES
from experiments.benchmark.timing import Program, Record
from experiments.errors import InputError
from experiments.evaluation.pictures import CostPanel, cost_curves
from experiments.evaluation.tables import column_table
from experiments.files import write_whole
from experiments.training.environment import count_cores, environment
from relpos_jax import RelativePositions, dot_product_attention
from relpos_jax.attention import skew
from relpos_jax.attention.choice import IMPLEMENTATIONS
from relpos_jax.attention.inputs import gather_inputs

STOCK, AGAIN = "jax.nn", "jax.nn (again)"
BLOCKWISE = ("chunked", "mosaic_gpu", "pallas_gpu")  # never hold [T, S] weights
MASKS, PASSES = ("bidirectional", "causal"), ("forward", "backward")
DTYPES = "bfloat16", "float32"


class Case(NamedTuple):
  """Describes a call to measure; its tables have 2 max_distance + 1 rows."""

  batch: int
  length: int
  heads: int
  width: int
  max_distance: int
  dtype: str
  is_causal: bool
  backward: bool


class Contestant(NamedTuple):
  """Holds an attention function, and names the relations that it computes."""

  relations: str  # "keys and values", "keys", "none", or "its own" for a scheme
  # Compiles the function for a case. Raises RuntimeError, with the reason, if it fails.
  prepare: Callable[[Case], Program]


def main(**values: Any) -> None:
  """Measures all cases; writes the results to a file, and then to a page.

  The file is OUT/attention/NAME.json, and is written again after each case. The page is
  OUT/attention.md, with a section for each file in OUT/attention.
  """
  # Leaves memory to PyTorch on the same GPU. JAX reads this when it first looks for
  # devices.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  usual = "float32" if jax.default_backend() == "cpu" else "bfloat16"
  (values["dtype"],) = _choose("dtype", values["dtype"] or usual, DTYPES)
  cases = _make_cases(values)
  contestants = choose_contestants(
    values["implementations"], values["schemes"], values["peers"]
  )
  folder = command.make_folder(values.pop("out") / "attention", "out")
  device = re.sub("[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-")
  path = folder / f"{values.pop('name') or device}.json"
  _check_settings(path, values)
  results = dict(environment=environment("torch"), settings=values)
  results |= dict(cases=[], contestants={})
  for name, contestant in contestants.items():
    results["contestants"][name] = {"relations": contestant.relations}
  for case in cases:
    title = f"T = {case.length:,}, {describe_case(case._asdict())}"
    print(title, file=sys.stderr)
    rows, functions = prepare(case, contestants)
    pairs = time_pairs(functions, choose_pairs(functions), values["repetitions"])
    measured = {**case._asdict(), "contestants": rows, "pairs": pairs}
    results["cases"].append(measured)
    write_whole(path, json.dumps(results) + "\n")
    print(column_table("", {title: _format_times(measured)}), end="\n\n")
  timing.rewrite_page(folder, draw_section)
  print(f"wrote {folder.with_suffix('.md')}")


def _check_settings(path: pathlib.Path, settings: Mapping[str, Any]) -> None:
  """Raises InputError if a file holds measurements with other settings."""
  if path.exists() and json.loads(path.read_text("utf-8"))["settings"] != settings:
    raise InputError(
      f"{path} holds measurements with other flags: give another --name, or delete it"
    )


def _make_cases(values: Mapping[str, Any]) -> list[Case]:
  masks = _choose("masks", values["masks"], MASKS)
  passes = _choose("passes", values["passes"], PASSES)
  tokens = values["tokens"]
  cases = []
  for word in values["lengths"].split(","):
    length = int(word) if word.isdecimal() else 0
    if not length or tokens % length:
      problem = f"--lengths: {word!r} does not divide --tokens={tokens}"
      raise InputError(f"{problem}; change one of them")
    for name, mask in itertools.product(passes, masks):
      case = Case(
        batch=tokens // length,
        length=length,
        heads=values["heads"],
        width=values["width"],
        max_distance=values["max_distance"],
        dtype=values["dtype"],
        is_causal=mask == "causal",
        backward=name == "backward",
      )
      cases.append(case)
  return cases


def _choose(flag: str, text: str, known: Collection[str]) -> list[str]:
  """Returns the names that a flag chooses among the known ones."""
  if text == "none":
    return []
  if text in ("all", "usual"):
    return [name for name in known if text == "all" or name != "reference"]
  names = list(dict.fromkeys(text.split(",")))
  for name in names:
    if name not in known:
      wanted = f"all, none or some of {', '.join(known)}"
      raise InputError(f"--{flag}: unknown {name!r}; want {wanted}")
  return names


# Contestants
# --------------------------------------------------------------------------------------


def _compile(
  case: Case, attention: Callable, backend: str | None = None, **options: Any
) -> Program:
  """Compiles attention(query, key, value, relations, **options) for a case."""
  if backend not in (None, jax.default_backend()):
    raise NotImplementedError(f"it needs a {backend.upper()}")
  function = functools.partial(attention, is_causal=case.is_causal, **options)
  return _compile_call(function, case, arguments(case))


def _compile_scheme(case: Case, scheme: str) -> Program:
  """Compiles a scheme's attention in its default implementation."""
  make = SCHEMES[scheme]
  positions = make(case.length, case.heads, case.width, nnx.Rngs(0))
  graphdef, params = nnx.split(positions)
  params = jax.tree.map(lambda x: x.astype(case.dtype), params)
  *tokens, _ = arguments(case)

  def attention(query, key, value, params):
    options = nnx.merge(graphdef, params).arguments(query, key)
    return dot_product_attention(value=value, is_causal=case.is_causal, **options)

  return _compile_call(attention, case, (*tokens, params))


def _compile_call(function: Callable, case: Case, arguments: tuple) -> Program:
  if case.backward:
    function = functools.partial(_with_gradients, function)
  compiled = jax.jit(function).lower(*arguments).compile()
  memory = compiled.memory_analysis()
  temporary_bytes = memory.temp_size_in_bytes
  other_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes

  def run():
    return compiled(*arguments)

  return Program(run, temporary_bytes, temporary_bytes + other_bytes)


def _with_gradients(function, cotangent, *arguments):
  result, pull_back = jax.vjp(function, *arguments)
  return result, pull_back(cotangent)


@functools.lru_cache(maxsize=1)
def arguments(case: Case) -> tuple:
  """Returns random query, key, value and relations, after a cotangent if backward."""
  keys = jax.random.split(jax.random.key(0), 6)
  shape = case.batch, case.length, case.heads, case.width
  num_tokens = 3 + case.backward
  tokens = [jax.random.normal(key, shape, case.dtype) for key in keys[:num_tokens]]
  tables = 2, 2 * case.max_distance + 1, case.width
  relations = RelativePositions(*jax.random.normal(keys[4], tables))
  return *tokens, relations


def _ours(query, key, value, relations, **options):
  return dot_product_attention(query, key, value, relations=relations, **options)


def _ours_without_relations(query, key, value, relations, **options):
  return dot_product_attention(query, key, value, **options)


def _jax_nn(query, key, value, relations, **options):
  return jax.nn.dot_product_attention(query, key, value, **options)


def _dense_bias(query, key, value, relations, **options):
  """Computes the relative key term of all pairs, and passes it to jax.nn as bias."""
  inputs = gather_inputs(query, key, value, relations=relations)
  logits = skew.relative_logits(inputs, *inputs.relations) * inputs.scale
  bias = logits.astype(query.dtype)
  return jax.nn.dot_product_attention(query, key, value, bias=bias, **options)


def _torch_sdpa(case: Case) -> Program:
  """Prepares PyTorch's scaled_dot_product_attention, without relations."""
  # Otherwise waiting threads spin, and slow the next JAX call down two to four times.
  os.environ.setdefault("OMP_WAIT_POLICY", "passive")
  try:
    import torch
    from torch.nn.functional import scaled_dot_product_attention
  except ImportError as error:
    remedy = "PyTorch is not installed: pip install 'relpos_jax[benchmark]'"
    raise NotImplementedError(remedy) from error

  torch.set_num_threads(count_cores())
  backend = jax.default_backend()
  if backend != "cpu" and not (backend == "gpu" and torch.cuda.is_available()):
    version = torch.__version__
    raise NotImplementedError(f"this PyTorch, {version}, finds no {backend.upper()}")
  device = "cpu" if backend == "cpu" else "cuda"
  tensors = []
  for array in arguments(case)[:-1]:
    array = np.asarray(array.swapaxes(1, 2), "f4")  # [B, N, T, H]
    tensor = torch.tensor(array, device=device, dtype=getattr(torch, case.dtype))
    tensors.append(tensor)
  *cotangent, query, key, value = tensors
  for tensor in (query, key, value):
    tensor.requires_grad_(case.backward)

  def run():
    result = scaled_dot_product_attention(query, key, value, is_causal=case.is_causal)
    if case.backward:
      result = torch.autograd.grad(result, (query, key, value), *cotangent)
    if device == "cuda":
      torch.cuda.synchronize()
    return result

  if device == "cpu":  # it may store all logits [B, N, T, S]
    return Program(run, None, 4 * case.batch * case.heads * case.length**2)
  run()  # loads the kernel, which must not count
  torch.cuda.reset_peak_memory_stats()
  before = torch.cuda.memory_allocated()
  run()
  return Program(run, torch.cuda.max_memory_allocated() - before, 0)


def _make_contestant(relations: str, attention: Callable, **options) -> Contestant:
  prepare = functools.partial(_compile, attention=attention, **options)
  return Contestant(relations, prepare)


PEERS = dict(
  dense_bias=_make_contestant("keys", _dense_bias),
  cudnn=_make_contestant("none", _jax_nn, backend="gpu", implementation="cudnn"),
  cudnn_dense_bias=_make_contestant(
    "keys", _dense_bias, backend="gpu", implementation="cudnn"
  ),
  torch_sdpa=Contestant("none", _torch_sdpa),
)


def choose_contestants(
  implementations: str, schemes: str, peers: str
) -> dict[str, Contestant]:
  """Chooses the functions to compare by the values of flags; returns them by name.

  jax.nn is among them twice. The ratio of its two times shows the noise.
  """
  stock = _make_contestant("none", _jax_nn)
  contestants = {STOCK: stock, AGAIN: stock}
  for name in _choose("implementations", implementations, IMPLEMENTATIONS):
    options = dict(backend=IMPLEMENTATIONS[name].device, implementation=name)
    contestants[name] = _make_contestant("keys and values", _ours, **options)
    # Without relations, `projected` computes the same as all others that hold weights.
    if name in (*BLOCKWISE, "projected"):
      bare = _make_contestant("none", _ours_without_relations, **options)
      contestants[f"{name} (no relations)"] = bare
  for name in _choose("schemes", schemes, SCHEMES):
    prepare = functools.partial(_compile_scheme, scheme=name)
    contestants[name] = Contestant("its own", prepare)
  for name in _choose("peers", peers, PEERS):
    contestants[name] = PEERS[name]
  return contestants


# Measurement
# --------------------------------------------------------------------------------------


def prepare(case: Case, contestants: Mapping[str, Contestant]) -> tuple[dict, dict]:
  """Runs each contestant once on a case.

  Returns a row for each name, with the memory, or the reason why the contestant is left
  out. Also returns a function for each contestant that can run the case.
  """
  rows, functions, programs = {}, {}, {}
  arguments(case)  # once, before the threads that share them
  # On GPUs most of the time of a benchmark is compilation.
  with concurrent.futures.ThreadPoolExecutor(count_cores()) as pool:
    for name, contestant in contestants.items():
      programs[name] = pool.submit(contestant.prepare, case)
  for name in contestants:
    row = rows[name] = dict(temporary_bytes=None, refused=None)
    try:
      program = programs[name].result()
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
  """Times the two functions of each pair in every repetition, in seconds.

  The speed of a machine drifts. So the functions of a pair run one right after the
  other, and take turns to be first.
  """
  timed = [dict(name=a, against=b, seconds=[], against_seconds=[]) for a, b in pairs]
  sides = [("against", "against_seconds"), ("name", "seconds")]
  for _ in range(repetitions):
    for pair in timed:
      for name, seconds in sides:
        pair[seconds].append(timing.run_time(functions[pair[name]]))
    sides.reverse()
  return timed


def choose_pairs(names: Collection[str]) -> list[tuple[str, str]]:
  """Chooses the pairs of functions that are timed against each other.

  All functions are paired with jax.nn. Blockwise implementations are also paired with
  two alternatives: themselves without relations, and per_position.
  """
  pairs = [(name, STOCK) for name in names if name != STOCK]
  for name in BLOCKWISE:
    pairs += [(name, f"{name} (no relations)"), (name, "per_position")]
  return [(name, other) for name, other in pairs if {name, other} <= {*names}]


# Page
# --------------------------------------------------------------------------------------


def draw_section(results: Record) -> str:
  """Makes the page's section on a file of results, and draws a picture next to it.

  Returns the section as Markdown.
  """
  settings, contestants = results["settings"], results["contestants"]
  cases = sorted(results["cases"], key=lambda case: case["length"])
  kinds = defaultdict(list)
  for case in cases:
    kinds[describe_case(case)].append(case)
  picture = results["path"].with_suffix(".png")
  dashed = []
  table = defaultdict(dict)
  for name, contestant in contestants.items():
    relations = contestant["relations"]
    if relations != "keys and values":
      dashed.append(name)
    reasons = dict.fromkeys(case["contestants"][name]["refused"] for case in cases)
    table["relations"][name] = relations
    table["reason for missing figures"][name] = "; ".join(filter(None, reasons))
  cost_curves(_make_panels(kinds, settings["tokens"]), dashed, picture)
  described = (
    f"{settings['dtype']}, N = {settings['heads']}, H = {settings['width']}, "
    f"k = {settings['max_distance']}, B T = {settings['tokens']:,}; "
    f"repetitions: {settings['repetitions']}."
  )
  parts = [
    timing.provenance(results, ("jax", "jaxlib", "torch")).strip(),
    described,
    f"![Time and memory over length](attention/{picture.name})",
    *_make_tables("Time", kinds, _format_times),
    *_make_tables("Temporary memory", kinds, _format_memory),
    "### Contestants",
    column_table("", table),
  ]
  return "\n\n".join(parts)


def _make_tables(
  title: str,
  kinds: Mapping[str, Sequence[Record]],
  cells: Callable[[Record], dict[str, str]],
) -> list[str]:
  """Makes a heading and a table for each kind of case, with a column for each length.

  `cells` returns the cells of a column, by contestant.
  """
  parts = []
  for kind, cases in kinds.items():
    columns = {f"T = {case['length']:,}": cells(case) for case in cases}
    parts += [f"### {title}, {kind}", column_table("", columns)]
  return parts


def _format_times(case: Record) -> dict[str, str]:
  """Formats jax.nn's median time, and the median and quartiles of each ratio."""
  times = estimate_milliseconds(case)
  cells = {}
  if times:
    cells[STOCK] = f"{times[STOCK]:,.1f} ms"
  for pair in case["pairs"]:
    low, median, high = _compute_ratios(pair)
    name = pair["name"]
    if pair["against"] != STOCK:
      name += f" / {pair['against']}"
    cells[name] = f"{median:.2f} ({low:.2f} to {high:.2f})"
  return cells


def _format_memory(case: Record) -> dict[str, str]:
  """Formats temporary memory, with its ratio to jax.nn's in brackets."""
  sizes = _collect_mebibytes(case)
  stock = sizes.get(STOCK)  # absent if jax.nn could not run
  cells = {}
  for name, size in sizes.items():
    cells[name] = f"{size:,.1f} MiB"
    if stock:
      cells[name] += f" ({size / stock:.3g})"
  return cells


def describe_case(case: Record) -> str:
  passes = "forward and backward" if case["backward"] else "forward"
  mask = "causal" if case["is_causal"] else "bidirectional"
  return f"{passes}, {mask}"


def estimate_milliseconds(case: Record) -> dict[str, float]:
  """Estimates the time of each contestant from its median ratio to jax.nn's time.

  It is that ratio multiplied by jax.nn's median time. During a benchmark, ratios drift
  less than times.
  """
  pairs = [pair for pair in case["pairs"] if pair["against"] == STOCK]
  if not pairs:
    return {}
  stock = 1e3 * float(np.median([pair["against_seconds"] for pair in pairs]))
  times = {STOCK: stock}
  for pair in pairs:
    _, median, _ = _compute_ratios(pair)
    times[pair["name"]] = stock * median
  return times


def _compute_ratios(pair: Record) -> list[float]:
  return timing.quartiles(np.divide(pair["seconds"], pair["against_seconds"]))


def _collect_mebibytes(case: Record) -> dict[str, float]:
  sizes = {}
  for name, row in case["contestants"].items():
    if row["temporary_bytes"] and name != AGAIN:
      sizes[name] = row["temporary_bytes"] / 2**20
  return sizes


def _make_panels(
  kinds: Mapping[str, Sequence[Record]], tokens: int
) -> list[list[CostPanel]]:
  """Makes a row of plots for each mask: time and temporary memory over length.

  The plots show the cases with a backward pass. If there are none, they show the cases
  with a forward pass alone.
  """
  backward = any(cases[0]["backward"] for cases in kinds.values())
  rows = []
  for kind, cases in sorted(kinds.items()):
    if cases[0]["backward"] == backward:
      title = f"{kind}, B T = {tokens:,}"
      milliseconds = _make_curves(cases, estimate_milliseconds)
      mebibytes = _make_curves(cases, _collect_mebibytes)
      row = [CostPanel(title, "milliseconds", milliseconds)]
      if mebibytes:
        row.append(CostPanel(title, "temporary memory, MiB", mebibytes))
      rows.append(row)
  return rows


def _make_curves(
  cases: Sequence[Record], values: Callable[[Record], dict[str, float]]
) -> dict[str, list[tuple[float, float]]]:
  """Makes the curve of each contestant: pairs of a length and a value.

  `values` returns the values of a case, by contestant.
  """
  curves = defaultdict(list)
  for case in cases:
    for name, value in values(case).items():
      if name != AGAIN:
        curves[name].append((case["length"], value))
  return curves
