"""AlphaGenome's attention, of the package alphagenome_research."""

import importlib
import math

import numpy as np


def make_original(module):
  """Returns the Haiku function of an `AttentionBiasBlock` and its `MHABlock`."""
  import haiku

  def attend(x, pairs):
    return module.MHABlock()(x, module.AttentionBiasBlock()(pairs))

  return haiku.without_apply_rng(haiku.transform_with_state(attend))


def apply_original(w, x, pairs):
  """Applies the original to parameters and states by their paths."""
  modules = {}
  for name, values in w.items():
    module, _, kind = name.rpartition("/")
    modules.setdefault(module, {})[kind] = values
  original = importlib.import_module("alphagenome_research.model.attention")
  return make_original(original).apply(modules, modules, x, pairs)[0]


def parameter_shapes(width: int, channels: int) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of the parameters and states by their paths."""
  norms = {
    "mha_block/rms_batch_norm": (1, 1, width),
    "mha_block/norm_q": (128,),
    "mha_block/norm_k": (128,),
    "mha_block/norm_v": (192,),
    "mha_block/rms_batch_norm_1": (1, 1, width),
    "attention_bias_block/rms_batch_norm": (1, 1, 1, channels),
  }
  shapes = {
    "mha_block/q_layer/w": (width, 8 * 128),
    "mha_block/k_layer/w": (width, 128),
    "mha_block/v_layer/w": (width, 192),
    "mha_block/linear_embedding/w": (8 * 192, width),
    "mha_block/linear_embedding/b": (width,),
    "attention_bias_block/linear/w": (channels, 8),
  }
  for name, shape in norms.items():
    shapes |= {f"{name}/scale": shape, f"{name}/offset": shape}
    if "rms_batch_norm" in name:
      shapes[f"{name}/var_ema"] = shape
  return shapes


def make_parameters(width: int, channels: int) -> dict[str, np.ndarray]:
  """Returns random parameters and states by their paths."""
  random = np.random.default_rng(0)
  parameters = {}
  for name, shape in parameter_shapes(width, channels).items():
    values = random.standard_normal(shape, np.float32)
    if name.endswith("/w"):
      values /= np.float32(math.sqrt(shape[0]))
    if name.endswith("/var_ema"):
      values = 0.5 + abs(values)
    parameters[name] = values
  return parameters
