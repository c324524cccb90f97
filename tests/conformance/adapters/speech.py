"""What adapters of Transformer-XL's attention in speech toolkits have in common."""

import torch

from adapters import is_self_attention, refuse_if

NAMES = ("mask", "causal", "key_table", "content_bias", "position_bias")


def all_distances(x):
  """Refuses other tables than one row for each distance, and Shaw's."""
  is_self_attention(x)
  queries, heads, width = x["query"].shape[1:]
  refuse_if("key_table" not in x, "always has positions")
  refuse_if(x["key_table"].shape != (2 * queries - 1, heads, width), "all distances")


def parameters_of(x, module, u="pos_bias_u", v="pos_bias_v"):
  """Returns tensors for a module's parameters: the biases, and identities."""
  heads, width = x["query"].shape[2:]
  zero = torch.zeros(heads, width, dtype=x["query"].dtype)
  parameters = {u: x.get("content_bias", zero), v: x.get("position_bias", zero)}
  for name, values in module.named_parameters():
    if name.endswith("weight"):
      parameters[name] = torch.eye(*values.shape, dtype=zero.dtype)
    elif name.endswith("bias"):
      parameters[name] = torch.zeros(values.shape, dtype=zero.dtype)
  return parameters


def rows_of(x):
  return [x[name].flatten(2) for name in ("query", "key", "value")]
