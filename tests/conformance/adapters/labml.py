"""labml's Transformer-XL attention (annotated implementations)."""

import torch
from labml_nn.transformers.xl import relative_mha

from adapters import in_torch, pair_mask, refuse_if, takes
from adapters.speech import all_distances

PACKAGES = ("labml-nn", "labml", "torch")


@takes("mask", "causal", "key_table", "content_bias", "position_bias")
@in_torch
def attend(x, options):
  all_distances(x)
  queries, heads, width = x["query"].shape[1:]
  module = relative_mha.RelativeMultiHeadAttention(heads, heads * width, 0.0).eval()
  refuse_if("position_bias" in x, "its bias of positions is a number")
  mask = pair_mask(x, options)
  refuse_if(mask.shape[1] > 1, "heads share the mask")
  rows = torch.zeros(2 * module.P, heads, width, dtype=x["query"].dtype)
  table = torch.cat([rows[: module.P - queries + 1], x["key_table"], rows])[
    : 2 * module.P
  ]
  eye = torch.eye(heads * width, dtype=rows.dtype)
  names = ("query.linear", "key.linear", "value.linear", "output")
  parameters = {f"{name}.weight": eye for name in names}
  parameters |= {"key_pos_embeddings": table, "output.bias": eye[0] * 0}
  parameters |= {"value.linear.bias": eye[0] * 0}
  arguments = {n: x[n].flatten(2).transpose(0, 1) for n in ("query", "key", "value")}
  arguments["mask"] = torch.tensor(mask[:, 0]).permute(1, 2, 0)
  y = torch.func.functional_call(module, parameters, (), arguments)
  return y.transpose(0, 1).unflatten(2, (heads, width))
