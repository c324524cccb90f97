"""SpeechBrain's RelPosMHAXL, of Conformer."""

import functools

import torch
from speechbrain.nnet.attention import RelPosMHAXL

from adapters import in_torch, pair_mask, takes
from adapters.speech import NAMES, all_distances, parameters_of, rows_of

PACKAGES = ("speechbrain", "torch")


def output_of(x, options, has_scale_of_head):
  all_distances(x)
  batch, queries, heads, width = x["query"].shape
  module = RelPosMHAXL(heads * width, heads)
  if has_scale_of_head:
    module.scale = width**-0.5
  parameters = parameters_of(x, module)
  parameters["in_proj_weight"] = parameters["linear_pos.weight"].repeat(3, 1)
  mask = ~torch.tensor(pair_mask(x, options))
  mask = mask.expand(batch, heads, queries, queries).flatten(0, 1)
  arguments = *rows_of(x), x["key_table"].flatten(1)[None], None, mask
  y, _ = torch.func.functional_call(module.eval(), parameters, arguments)
  return y.unflatten(2, (heads, width))


def attend_by(has_scale_of_head):
  function = functools.partial(output_of, has_scale_of_head=has_scale_of_head)
  return takes(*NAMES)(in_torch(function))


attend = attend_by(False)
head_scale = attend_by(True)  # the module has the root of the model's width
