"""PyTorch's function, and its layer with projections that change nothing."""

import torch
from torch.nn import functional

from adapters import in_torch, pair_mask, refuse_if, takes

PACKAGES = ("torch",)
MASKS = ("mask", "causal", "query_offset", "query_segments", "key_segments")


def heads_first(x):
  return [x[name].transpose(1, 2) for name in ("query", "key", "value")]


@takes("bias", "mask", "scale", "causal", "query_offset")
@in_torch
def attend(x, options):
  refuse_if(options.get("query_offset"), "has no offset of queries")
  refuse_if("mask" in x and "bias" in x, "one of mask and bias")
  mask = x.get("mask", x.get("bias"))
  refuse_if(options.get("causal") and mask is not None, "causal, or a mask")
  groups = {"scale": options.get("scale"), "enable_gqa": True}
  causal = options.get("causal", False)
  y = functional.scaled_dot_product_attention(
    *heads_first(x), mask, 0.0, causal, **groups
  )
  return y.transpose(1, 2)


@takes(*MASKS)
@in_torch
def layer(x, options):
  batch, queries, heads, width = x["query"].shape
  refuse_if(
    x["value"].shape[2:] != (heads, width), "values and keys as wide as queries"
  )
  one = torch.eye(heads * width, dtype=x["query"].dtype)
  mask = torch.tensor(~pair_mask(x, options))
  mask = mask.expand(batch, heads, *mask.shape[2:]).flatten(0, 1)
  rows = [x[name].flatten(2).transpose(0, 1) for name in ("query", "key", "value")]
  y, _ = functional.multi_head_attention_forward(
    *rows, heads * width, heads, in_proj_weight=None, in_proj_bias=None, bias_k=None,
    bias_v=None, add_zero_attn=False, dropout_p=0.0, out_proj_weight=one,
    out_proj_bias=None, attn_mask=mask, use_separate_proj_weight=True,
    q_proj_weight=one, k_proj_weight=one, v_proj_weight=one,
  )  # fmt: skip
  return y.transpose(0, 1).reshape(batch, queries, heads, width)
