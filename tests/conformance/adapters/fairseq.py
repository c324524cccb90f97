"""fairseq's RelPositionMultiHeadedAttention, of Conformer."""

import importlib
import pathlib
import sys
import types

import torch

from adapters import in_torch, refuse_if, takes
from adapters.speech import NAMES, all_distances, parameters_of, rows_of

PACKAGES = ("fairseq", "torch")
# The package does not import on Python 3.11, the file of this module does.
for name in ("fairseq", "fairseq.modules"):
  folders = [pathlib.Path(folder, *name.split(".")) for folder in sys.path]
  sys.modules[name] = types.ModuleType(name)
  sys.modules[name].__path__ = [str(x) for x in folders if x.exists()]
attention = importlib.import_module("fairseq.modules.espnet_multihead_attention")


@takes(*set(NAMES) - {"causal"})
@in_torch
def attend(x, options):
  all_distances(x)
  heads, width = x["query"].shape[2:]
  module = attention.RelPositionMultiHeadedAttention(heads * width, heads, 0.0)
  padding = None
  if "mask" in x:
    refuse_if(x["mask"].shape[1:3] != (1, 1), "masks of keys")
    padding = ~x["mask"][:, 0, 0]
  rows = [y.transpose(0, 1) for y in rows_of(x)]
  arguments = *rows, x["key_table"].flatten(1)[:, None], padding
  y, _ = torch.func.functional_call(module.eval(), parameters_of(x, module), arguments)
  return y.transpose(0, 1).unflatten(2, (heads, width))
