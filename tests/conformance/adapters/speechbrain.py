"""SpeechBrain's RelPosMHAXL, of Conformer."""

import pathlib
import runpy
import sys
import types

import torch

from adapters import in_torch, pair_mask, takes
from adapters.speech import NAMES, all_distances, parameters_of, rows_of

PACKAGES = ("speechbrain", "torch")
# The package needs torchaudio on import, this file does not.
FOLDERS = [pathlib.Path(folder, "speechbrain/nnet") for folder in sys.path]
FILE = next(folder / "attention.py" for folder in FOLDERS if folder.exists())


def module_class():
  stubs = {}
  for name in ("dataio.dataio", "utils.logger"):
    stubs[f"speechbrain.{name}"] = types.ModuleType(name)
  stubs["speechbrain.dataio.dataio"].length_to_mask = None
  stubs["speechbrain.utils.logger"].get_logger = print
  sys.modules.update(stubs)
  return runpy.run_path(str(FILE))["RelPosMHAXL"]


RelPosMHAXL = module_class()


@takes(*NAMES)
@in_torch
def attend(x, options):
  all_distances(x)
  batch, queries, heads, width = x["query"].shape
  module = RelPosMHAXL(heads * width, heads)
  parameters = parameters_of(x, module)
  parameters["in_proj_weight"] = parameters["linear_pos.weight"].repeat(3, 1)
  mask = ~torch.tensor(pair_mask(x, options))
  mask = mask.expand(batch, heads, queries, queries).flatten(0, 1)
  arguments = *rows_of(x), x["key_table"].flatten(1)[None], None, mask
  y, _ = torch.func.functional_call(module.eval(), parameters, arguments)
  return y.unflatten(2, (heads, width))
