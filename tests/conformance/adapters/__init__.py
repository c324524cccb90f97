"""Adapters: `attend(arrays, options) -> output, gradients` of an implementation each.

The decorators here do what adapters have in common: `takes` refuses what is not named,
`in_jax` and `in_torch` turn a function that returns the output into one that also
returns the gradients.
"""

import functools

import numpy as np
from papers import FIXED

ALWAYS = {"query", "key", "value", "cotangent"}


def takes(*names):
  """Returns a decorator that refuses arrays and options of other names."""

  def decorate(function):
    @functools.wraps(function)
    def attend(arrays, options):
      others = (arrays.keys() | options.keys()) - ALWAYS - set(names)
      if others:
        raise NotImplementedError("takes no " + ", ".join(sorted(others)))
      return function(arrays, options)

    return attend

  return decorate


def refuse_if(condition, reason):
  """Raises NotImplementedError for a call that the implementation does not offer."""
  if condition:
    raise NotImplementedError(reason)


def pair_mask(x, options):
  """Joins mask, causality and segments, for calls that have no argument but a mask."""
  queries, keys = x["query"].shape[1], x["key"].shape[1]
  query_at = np.arange(queries) + options.get("query_offset", 0)
  is_earlier = np.arange(keys) <= query_at[:, None]
  mask = np.ones((1, 1, queries, keys), bool)
  if options.get("causal"):
    mask = mask & is_earlier
  if "query_segments" in x:
    segments = np.asarray(x["query_segments"]), np.asarray(x["key_segments"])
    mask = mask & (segments[0][:, None, :, None] == segments[1][:, None, None, :])
  if "mask" in x:
    mask = mask & np.asarray(x["mask"])
  return mask


def in_jax(function):
  """Adds gradients to a function of JAX arrays that returns the output."""
  import jax

  @functools.wraps(function)
  def attend(arrays, options):
    fixed, positions, moving = {}, {}, {}
    for name, x in arrays.items():
      if name.endswith("_positions"):
        positions[name] = x
      elif name in FIXED:
        fixed[name] = x
      else:
        moving[name] = x

    # One compilation; without it each operation has its own. Positions are arguments:
    # XLA computes with constants in advance, and rounds otherwise.
    @jax.jit
    def output_and_gradients(moving, positions, cotangent):
      def output_of(moving):
        return function(fixed | positions | moving, options)

      output, pull_back = jax.vjp(output_of, moving)
      (gradients,) = pull_back(cotangent.astype(output.dtype))
      return output, gradients

    # Otherwise GPUs and TPUs multiply float32 with fewer digits.
    precision = jax.default_matmul_precision("highest")
    with precision, jax.enable_x64(arrays["query"].dtype == np.float64):
      results = output_and_gradients(moving, positions, arrays["cotangent"])
    return jax.tree.map(np.asarray, results)

  return attend


def in_torch(function):
  """Adds gradients to a function of PyTorch tensors that returns the output."""
  import torch

  @functools.wraps(function)
  def attend(arrays, options):
    tensors = {name: torch.tensor(np.array(x)) for name, x in arrays.items()}
    moving = [name for name in tensors if name not in FIXED]
    for name in moving:
      tensors[name].requires_grad_()
    output = function(tensors, options)
    output.backward(tensors["cotangent"].to(output.dtype))
    gradients = {}
    for name in moving:
      gradient = tensors[name].grad
      zero = torch.zeros_like(tensors[name])
      gradients[name] = (zero if gradient is None else gradient).numpy()
    return output.detach().numpy(), gradients

  return attend


def third(number):
  """Returns a module that takes the first, second or third part of the last axis."""
  import torch

  class Third(torch.nn.Module):
    def forward(self, x):
      return x.chunk(3, -1)[number]

  return Third()


def joined(*arrays):
  """Returns tensors [B, T, N, H] side by side, [B, T, N H ...]."""
  import torch

  return torch.cat([x.flatten(2) for x in arrays], -1)


def additive(x, options):
  """Returns the mask as numbers to add: zero, or the lowest number of the dtype."""
  import torch

  mask = torch.tensor(pair_mask(x, options))
  lowest = torch.finfo(x["query"].dtype).min
  return torch.zeros(mask.shape, dtype=x["query"].dtype).masked_fill(~mask, lowest)


def is_self_attention(x, options=None):
  """Refuses what a module of self-attention does not take."""
  queries, keys = x["query"], x["key"]
  refuse_if(queries.shape != keys.shape, "self-attention: T is S, and N is K")
  refuse_if(x["value"].shape != keys.shape, "values are as wide as keys")
