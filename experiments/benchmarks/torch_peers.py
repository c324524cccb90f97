"""What the operator's benchmark measures in PyTorch, which the extra `benchmark` installs.

Both libraries run in one process, one after the other, with as many threads as there are cores.
"""

import functools
import importlib.util
import os
import warnings
from collections.abc import Mapping

import jax
import numpy as np

from experiments.benchmarks import contestants
from experiments.benchmarks.contestants import Case, Contestant, Prepared

# PyTorch's own limit for all that is compiled of one function; the other one is 8.
_MOST_CASES = 256


def _prepare(attention, num_inputs: int, scores_at_once: int):
  """Makes attention(case, q, k, v, table) ready, which needs so many arrays [B, N, T, S].

  It depends on the first `num_inputs` of them, all of which must have gradients.
  """

  def prepare(case: Case) -> Prepared:
    torch = _torch()
    device = _device(torch)
    scores = case.batch * case.heads * case.length**2 * np.dtype("f4").itemsize
    function = functools.partial(_run, torch, attention, num_inputs, case, device)
    needed = scores_at_once * scores if device == "cpu" else 0
    return Prepared(function, _peak(torch, function) if device == "cuda" else None, needed)

  return prepare


def _torch():
  if importlib.util.find_spec("torch") is None:
    raise NotImplementedError("PyTorch is not installed: pip install 'relpos_jax[benchmark]'")
  # Threads that wait by spinning take the cores from the JAX call that comes next, which then takes
  # two to four times as long; PyTorch itself is none the slower for sleeping.
  os.environ.setdefault("OMP_WAIT_POLICY", "passive")
  import torch

  if hasattr(os, "sched_getaffinity"):
    torch.set_num_threads(len(os.sched_getaffinity(0)))
  return torch


def _device(torch) -> str:
  """The device of the same kind as JAX's."""
  backend = jax.default_backend()
  if backend == "gpu" and not torch.cuda.is_available():
    raise NotImplementedError(f"this PyTorch, {torch.__version__}, finds no GPU")
  if backend not in ("cpu", "gpu"):
    raise NotImplementedError(f"there is no PyTorch for {backend}")
  return "cpu" if backend == "cpu" else "cuda"


@functools.lru_cache
def _tensors(case: Case, device: str) -> tuple:
  """Those of JAX: cotangent (or None), then q, k, v as [B, N, T, H] and the key table."""
  import torch

  *arrays, relations = contestants.arguments(case)
  arrays = [array.swapaxes(1, 2) for array in arrays] + [relations.key]
  move = lambda array: torch.tensor(np.asarray(array, "f4")).to(device, getattr(torch, case.dtype))
  cotangent, *inputs = [None] * (not case.backward) + [move(array) for array in arrays]
  return cotangent, [tensor.requires_grad_(case.backward) for tensor in inputs]


def _run(torch, attention, num_inputs: int, case: Case, device: str):
  cotangent, inputs = _tensors(case, device)
  result = attention(torch, case, *inputs)
  if case.backward:
    result = torch.autograd.grad(result, inputs[:num_inputs], cotangent)
  if device == "cuda":
    torch.cuda.synchronize()
  return result


def _peak(torch, function) -> int:
  """Bytes that the second run takes at most; the first one compiles."""
  function()
  torch.cuda.reset_peak_memory_stats()
  before = torch.cuda.memory_allocated()
  function()
  return torch.cuda.max_memory_allocated() - before


def _sdpa(torch, case, query, key, value, table):
  attention = torch.nn.functional.scaled_dot_product_attention
  return attention(query, key, value, is_causal=case.is_causal)


def _flex(torch, case, query, key, value, table):
  """The key term of every row of the table is a buffer [B, N, T, 2k + 1], looked up by distance."""
  k = case.max_distance
  buffer = torch.einsum("bnth,rh->bntr", query * case.width**-0.5, table)

  def add_relative_term(score, b, n, i, j):
    return score + buffer[b, n, i, torch.clamp(j - i, -k, k) + k]

  mask = _causal_mask(case.length, query.device.type) if case.is_causal else None
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    warnings.filterwarnings("ignore", ".* attribute of a Tensor that is not a leaf")  # `buffer`'s
    return _flex_attention(query.device.type)(
      query, key, value, score_mod=add_relative_term, block_mask=mask
    )


@functools.lru_cache
def _flex_attention(device: str):
  """FlexAttention, compiled anew for each case; a RuntimeError where it cannot be.

  Each case has shapes of its own, and after 8 of them PyTorch would give up: it would run the
  others as written, all scores in memory, and their times would pass for the kernel's. Hence a
  higher limit, and `fullgraph`, by which what is not compiled is an error.
  """
  import torch
  from torch.nn.attention.flex_attention import flex_attention

  torch._dynamo.config.recompile_limit = _MOST_CASES
  if device != "cpu":
    flex_attention = torch.compile(flex_attention, dynamic=False, fullgraph=True)

  def attention(*arguments, **options):
    try:
      return flex_attention(*arguments, **options)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:  # is no RuntimeError
      raise RuntimeError(f"it is compiled for {_MOST_CASES} cases at most") from error

  return attention


@functools.lru_cache
def _causal_mask(length: int, device: str):
  from torch.nn.attention.flex_attention import create_block_mask

  sees = lambda b, n, i, j: j <= i
  return create_block_mask(sees, None, None, length, length, device=device)


TORCH_PEERS: Mapping[str, Contestant] = {
  "torch_sdpa": Contestant(
    "none",
    "PyTorch's `scaled_dot_product_attention`",
    _prepare(_sdpa, num_inputs=3, scores_at_once=1),
    runs_to_prepare=True,
  ),
  "flex_attention": Contestant(
    "keys",
    "PyTorch's FlexAttention, the key term looked up in a captured `[B, N, T, 2k + 1]`; compiled "
    "on GPUs, on CPUs eager, which materialises all scores",
    _prepare(_flex, num_inputs=4, scores_at_once=8),
    runs_to_prepare=True,
  ),
}
