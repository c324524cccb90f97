"""MLX's fast.scaled_dot_product_attention, its ALiBi and its RoPE, on the CPU."""

import functools

import mlx.core as mx
import mlx.nn
import numpy as np

from adapters import FIXED, refuse_if, takes

PACKAGES = ("mlx",)
NAMES = ("mask", "causal", "query_offset", "bias", "scale", "sinks", "alibi", "rotary")


def output_of(x, options):
  q, k, v = (x[name].transpose(0, 2, 1, 3) for name in ("query", "key", "value"))
  offset = options.get("query_offset", 0)
  if "rotary" in options:
    turn = make_rotary(q.shape[3], options["rotary"] == "interleaved")
    q, k = turn(q, offset), turn(k)
  arguments = {
    "scale": options.get("scale", q.shape[3] ** -0.5),
    "sinks": x.get("sinks"),
  }
  mask = mask_of(x, options, q, k, offset)
  y = mx.fast.scaled_dot_product_attention(q, k, v, mask=mask, **arguments)
  return y.transpose(0, 2, 1, 3)


@functools.cache  # one module for all calls: `is_fresh` looks for what it keeps
def make_rotary(width, interleaved):
  return mlx.nn.RoPE(width, traditional=interleaved)


def mask_of(x, options, q, k, offset):
  masks = {"mask", "bias", "causal", "alibi"} & (x | options).keys()
  refuse_if(len(masks) > 1, "one of mask, bias, causal and ALiBi")
  if "causal" in options:
    refuse_if(offset != k.shape[2] - q.shape[2], "queries are the last of the keys")
    return "causal"
  if "alibi" in options:
    sizes = q.shape[2], k.shape[2], q.shape[1]
    return mlx.nn.ALiBi.create_alibi_matrix(*sizes, offset, q.dtype)
  return x.get("mask", x.get("bias"))


@takes(*NAMES)
def attend(arrays, options):
  refuse_if(arrays["query"].dtype == np.float64, "no float64")
  x = {name: mx.array(values) for name, values in arrays.items()}
  moving = [name for name in x if name not in FIXED]

  def call(*values):
    return [output_of(x | dict(zip(moving, values, strict=True)), options)]

  values = [x[name] for name in moving]
  (output,), gradients = mx.vjp(call, values, [x["cotangent"]])
  gradients = {name: np.array(y) for name, y in zip(moving, gradients, strict=True)}
  return np.array(output), gradients
