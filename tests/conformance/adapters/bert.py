"""BERT with relative_key, which transformers had before version 5."""

import torch
from transformers.models.bert import modeling_bert

from adapters import (
  additive,
  in_torch,
  is_self_attention,
  joined,
  refuse_if,
  takes,
  third,
)

PACKAGES = ("transformers", "torch")


@takes("mask", "causal", "key_table")
@in_torch
def attend(x, options):
  is_self_attention(x)
  refuse_if("key_table" not in x, "has positions")
  refuse_if(x["key_table"].ndim > 2, "heads share the table")
  heads, width = x["query"].shape[2:]
  config = modeling_bert.BertConfig(
    hidden_size=heads * width,
    num_attention_heads=heads,
    max_position_embeddings=(len(x["key_table"]) + 1) // 2,
  )
  module = modeling_bert.BertSelfAttention(config, "relative_key").eval()
  module.query, module.key, module.value = map(third, range(3))
  table = {"distance_embedding.weight": x["key_table"].flip(0)}  # by i - j
  rows = joined(x["query"], x["key"], x["value"]), additive(x, options)
  y = torch.func.functional_call(module, table, rows)[0]
  return y.unflatten(2, (heads, width))
