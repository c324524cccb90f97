"""tokamax.dot_product_attention: its XLA paths."""

import functools

import absl.flags
import tokamax

from adapters import in_jax, takes

PACKAGES = ("tokamax", "jax")
absl.flags.FLAGS.mark_as_parsed()  # it would read pytest's


def output_of(x, options, implementation):
  return tokamax.dot_product_attention(
    x["query"],
    x["key"],
    x["value"],
    x.get("bias"),
    x.get("mask"),
    scale=options.get("scale"),
    is_causal=options.get("causal", False),
    local_window_size=options.get("window"),
    logits_soft_cap=options.get("soft_cap"),
    implementation=implementation,
  )


def attend_by(implementation):
  function = functools.partial(output_of, implementation=implementation)
  names = "bias", "mask", "scale", "causal", "window", "soft_cap"
  return takes(*names)(in_jax(function))


attend = attend_by("xla")
chunked = attend_by("xla_chunked")
