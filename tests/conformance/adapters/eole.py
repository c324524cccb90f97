"""eole's self-attention (OpenNMT) with T5's positions or ALiBi, and its cache."""

import types

import torch
from eole.constants import PositionEncodingType
from eole.modules import multi_headed_attn

from adapters import in_torch, joined, pair_mask, refuse_if, takes, third

PACKAGES = ("eole", "torch")
# Options of the layer that are off.
OFF = (
  "heads_kv",
  "add_key_bias",
  "query_norm",
  "key_norm",
  "value_norm",
  "qk_norm_post_rope",
  "rope_config",
)


def module_for(x, options):
  both, farthest = options.get("t5", (False, 128))
  config = make_config(x, options, farthest)
  module = multi_headed_attn.SelfMHA(config, is_decoder=not both).eval()
  module.linear_query, module.linear_keys, module.linear_values = map(third, range(3))
  module.final_linear = torch.nn.Identity()
  return module


def make_config(x, options, farthest):
  heads, width = x["query"].shape[2:]
  kinds = {True: PositionEncodingType.Alibi, False: PositionEncodingType.Relative}
  return types.SimpleNamespace(
    dim_per_head=width,
    heads=heads,
    hidden_size=heads * width,
    n_positions=farthest,
    relative_positions_buckets=len(x.get("buckets", ())),
    position_encoding_type=kinds["alibi" in options],
    attn_scaling=options.get("scale", width**-0.5) ** -2,
    add_qkvbias=False,
    add_final_linear_bias=False,
    sliding_window=0,
    **dict.fromkeys(OFF),
  )


@takes("mask", "causal", "buckets", "t5", "scale", "alibi", "query_offset")
@in_torch
def attend(x, options):
  refuse_if("buckets" not in x and "alibi" not in options, "has positions")
  start, queries = options.get("query_offset"), x["query"].shape[1]
  new = slice(start or 0, (start or 0) + queries)
  refuse_if(start is None and x["key"].shape[1] != queries, "self-attention")
  refuse_if(start is not None and not options.get("causal"), "a cache is for decoders")
  module = module_for(x, options)
  arguments = {"attn_mask": torch.tensor(pair_mask(x, options))}
  if start is not None:  # a cache, whose later slots nobody attends to
    module.kcache, module.vcache = x["key"].clone(), x["value"].clone()
    arguments["cache_slice"] = torch.arange(new.start, new.stop)
  rows = joined(x["query"], x["key"][:, new], x["value"][:, new])
  parameters = (
    {"relative_attention_bias.weight": x["buckets"]} if "buckets" in x else {}
  )
  y, _ = torch.func.functional_call(module, parameters, (rows,), arguments)
  return y.unflatten(2, x["query"].shape[2:])
