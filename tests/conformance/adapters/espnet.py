"""ESPnet's RelPositionMultiHeadedAttention, of Conformer."""

import torch
from espnet.nets.pytorch_backend.transformer import attention

from adapters import in_torch, pair_mask, refuse_if, takes
from adapters.speech import NAMES, all_distances, parameters_of, rows_of

PACKAGES = ("espnet", "torch")


@takes(*NAMES)
@in_torch
def attend(x, options):
  all_distances(x)
  heads, width = x["query"].shape[2:]
  module = attention.RelPositionMultiHeadedAttention(heads, heads * width, 0.0)
  mask = pair_mask(x, options)
  refuse_if(mask.shape[1] > 1, "heads share the mask")
  arguments = *rows_of(x), x["key_table"].flatten(1)[None], torch.tensor(mask[:, 0])
  y = torch.func.functional_call(module.eval(), parameters_of(x, module), arguments)
  return y.unflatten(2, (heads, width))
