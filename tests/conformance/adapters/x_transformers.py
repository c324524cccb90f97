"""x-transformers' Attend, with or without flash, and its position modules."""

import functools

import torch
from x_transformers import attend as attending
from x_transformers import x_transformers as modules

from adapters import in_torch, refuse_if, takes

PACKAGES = ("x-transformers", "torch")
NAMES = ("mask", "causal", "query_offset", "bias", "scale", "soft_cap", "sinks")
NAMES += ("alibi", "buckets", "t5", "rotary")


def output_of(x, options, flash):
  q, k, v = (x[name].transpose(1, 2) for name in ("query", "key", "value"))
  queries, keys = q.shape[2], k.shape[2]
  is_last = options.get("query_offset", 0) == keys - queries
  refuse_if(not is_last and positions(options), "queries are the last of the keys")
  refuse_if(flash and {"sinks", "soft_cap"} & (x | options).keys(), "not with flash")
  module = make_module(x, options, flash)
  q, k = turned(q, k, options)
  sinks = {"head_attn_sink": x["sinks"]} if "sinks" in x else {}
  masks = {"mask": x.get("mask"), "attn_bias": bias_of(x, options, queries, keys)}
  y = torch.func.functional_call(module, sinks, (q, k, v), masks)[0]
  return y.transpose(1, 2)


def make_module(x, options, flash):
  return attending.Attend(
    causal=options.get("causal", False),
    heads=x["query"].shape[2],
    flash=flash,
    scale=options.get("scale"),
    softclamp_logits="soft_cap" in options,
    logit_softclamp_value=options.get("soft_cap", 50.0),
    head_learned_sink="sinks" in x,
  )


def positions(options):
  return {"causal", "alibi", "t5", "rotary", "query_offset"} & options.keys()


def turned(q, k, options):
  if "rotary" not in options:
    return q, k
  refuse_if(options["rotary"] != "interleaved", "turns neighbours")
  frequencies, scale = modules.RotaryEmbedding(q.shape[3]).forward_from_seq_len(
    k.shape[2]
  )
  turn = modules.apply_rotary_pos_emb
  return turn(q, frequencies, scale), turn(k, frequencies, scale)


def bias_of(x, options, queries, keys):
  heads = x["query"].shape[2]
  if "alibi" in options:
    return modules.AlibiPositionalBias(heads)(queries, keys)
  if "buckets" in x:
    both, farthest = options["t5"]
    sizes = len(x["buckets"]), farthest, heads
    module = modules.RelativePositionBias(1.0, not both, *sizes)
    table = {"relative_attention_bias.weight": x["buckets"]}
    return torch.func.functional_call(module, table, (queries, keys))
  return x.get("bias")


def attend_by(flash):
  function = functools.partial(output_of, flash=flash)
  return takes(*NAMES)(in_torch(function))


attend = attend_by(False)
flash = attend_by(True)
