"""PyTorch's attention functions for the attention benchmark; the extra `benchmark` installs it.

Both libraries run in one process, one after the other, with as many threads as there are cores.
"""

import functools
import importlib.metadata
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.benchmark.timing import Program


def version() -> str | None:
  """Returns PyTorch's version; None if it is not installed."""
  found = importlib.util.find_spec("torch")
  return importlib.metadata.version("torch") if found else None


def prepare(attention: Callable, num_inputs: int, num_scores: int, case: Any, arrays) -> Program:
  """Makes attention(torch, case, q, k, v, table) ready to run on the arguments of a case.

  Args:
    attention: one of the functions below.
    num_inputs: how many of q, k, v and table need gradients.
    num_scores: arrays [B, N, T, S] that it holds at once on a CPU.
    case: an `attention.Case`.
    arrays: the cotangent if the case has a backward pass, query, key, value and relations.

  Raises:
    NotImplementedError: no PyTorch, or none for JAX's device.
  """
  torch = _torch()
  device = _device(torch)
  *tokens, relations = arrays
  arrays = [array.swapaxes(1, 2) for array in tokens] + [relations.key]  # [B, N, T, H]
  to_torch = lambda x: torch.tensor(np.asarray(x, "f4")).to(device, getattr(torch, case.dtype))
  cotangent, *inputs = [None] * (not case.backward) + [to_torch(array) for array in arrays]
  inputs = [tensor.requires_grad_(case.backward) for tensor in inputs]

  def run():
    result = attention(torch, case, *inputs)
    if case.backward:
      result = torch.autograd.grad(result, inputs[:num_inputs], cotangent)
    if device == "cuda":
      torch.cuda.synchronize()
    return result

  if device == "cuda":
    return Program(run, _peak_bytes(torch, run), 0)
  scores = case.batch * case.heads * case.length**2 * np.dtype("f4").itemsize
  return Program(run, None, num_scores * scores)


def _torch():
  if version() is None:
    raise NotImplementedError("PyTorch is not installed: pip install 'relpos_jax[benchmark]'")
  # Threads that wait by spinning take the cores from the JAX call that comes next, which then takes
  # two to four times as long; PyTorch itself is none the slower for sleeping.
  os.environ.setdefault("OMP_WAIT_POLICY", "passive")
  import torch

  if hasattr(os, "sched_getaffinity"):
    torch.set_num_threads(len(os.sched_getaffinity(0)))
  return torch


def _device(torch) -> str:
  backend = jax.default_backend()
  if backend == "gpu" and not torch.cuda.is_available():
    raise NotImplementedError(f"this PyTorch, {torch.__version__}, finds no GPU")
  if backend not in ("cpu", "gpu"):
    raise NotImplementedError(f"there is no PyTorch for {backend}")
  return "cpu" if backend == "cpu" else "cuda"


def _peak_bytes(torch, run) -> int:
  """Returns the peak memory of the second run; the first one compiles."""
  run()
  torch.cuda.reset_peak_memory_stats()
  before = torch.cuda.memory_allocated()
  run()
  return torch.cuda.max_memory_allocated() - before


def sdpa(torch, case, query, key, value, table):
  """Computes attention without relations."""
  attention = torch.nn.functional.scaled_dot_product_attention
  return attention(query, key, value, is_causal=case.is_causal)


def flex(torch, case, query, key, value, table):
  """Computes attention with the key term, looked up by distance in a buffer [B, N, T, 2 k + 1]."""
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
  """Returns FlexAttention, on GPUs compiled anew for each case.

  After 8 shapes PyTorch would run the others uncompiled, all scores in memory, and their times
  would pass for the kernel's. Hence a higher limit, and `fullgraph`, which makes that an error.
  """
  import torch
  from torch.nn.attention.flex_attention import flex_attention

  torch._dynamo.config.recompile_limit = 256
  if device == "cpu":
    return flex_attention
  return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@functools.lru_cache
def _causal_mask(length: int, device: str):
  from torch.nn.attention.flex_attention import create_block_mask

  sees = lambda b, n, i, j: j <= i
  return create_block_mask(sees, None, None, length, length, device=device)
