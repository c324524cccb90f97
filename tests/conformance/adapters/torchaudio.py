"""torchaudio's self-attention of WavLM without its gate: its positions are T5's."""

import torch
from torch.nn import functional
from torchaudio.models.wav2vec2.wavlm_attention import WavLMSelfAttention

from adapters import in_torch, is_self_attention, joined, refuse_if, takes

PACKAGES = ("torchaudio", "torch")


def parameters_of(x):
  """Makes the first heads take queries, keys and values from a third of the input each.

  The other heads have zeros.
  """
  heads, width = x["query"].shape[2:]
  model = heads * width
  one = functional.pad(torch.eye(model, dtype=x["query"].dtype), (0, 0, 0, 2 * model))
  return {
    "rel_attn_embed.weight": functional.pad(x["buckets"], (0, 2 * heads)),
    "attention.in_proj_weight": torch.block_diag(one, one, one),
    "attention.out_proj.weight": torch.eye(3 * model, dtype=one.dtype),
  }


@takes("mask", "buckets", "t5", "scale")
@in_torch
def attend(x, options):
  is_self_attention(x)
  heads, width = x["query"].shape[2:]
  both, farthest = options.get("t5", (False, 128))
  refuse_if("buckets" not in x or not both, "has T5's positions, in both directions")
  refuse_if("mask" in x and x["mask"].shape[1:3] != (1, 1), "masks of keys")
  sizes = 3 * heads * width, 3 * heads, 0.0, False, True, len(x["buckets"]), farthest
  module = WavLMSelfAttention(*sizes, gru_rel_pos=False).eval()
  query = x["query"] * options.get("scale", width**-0.5) * width**0.5
  padding = ~x["mask"].flatten(1) if "mask" in x else None
  rows = joined(query, x["key"], x["value"]), padding
  y, _ = torch.func.functional_call(module, parameters_of(x), rows)
  return y[..., : heads * width].unflatten(2, (heads, width))
