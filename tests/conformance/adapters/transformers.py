"""transformers' modules, with projections that change nothing."""

import functools

import torch
from transformers import cache_utils
from transformers.models.bloom import modeling_bloom
from transformers.models.deberta_v2 import modeling_deberta_v2
from transformers.models.llama import modeling_llama
from transformers.models.mpt import modeling_mpt
from transformers.models.t5 import modeling_t5
from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert
from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer

from adapters import (
  additive,
  in_torch,
  is_self_attention,
  joined,
  pair_mask,
  refuse_if,
  takes,
  third,
)

PACKAGES = ("transformers", "torch")
MASKS = ("mask", "causal", "query_segments", "key_segments")


def by(attention, function, *names):
  """Returns the adapter of a module with transformers' "eager" or "sdpa" attention."""
  chosen = functools.partial(function, attention=attention)
  return takes(*MASKS, *names)(in_torch(chosen))


def with_parameters(module, parameters, *arguments, **options):
  """Calls a module with these tensors as its parameters; all others are zero."""
  zeros = {name: torch.zeros_like(x) for name, x in module.named_parameters()}
  call = torch.func.functional_call
  return call(module.eval(), zeros | parameters, arguments, options)


def t5_of(x, options, attention):
  queries, heads, width = x["query"].shape[1:]
  past = options.get("query_offset", 0)
  refuse_if(options.get("scale") != 1.0, "has no scale")
  refuse_if(x["key"].shape[1] != past + queries, "keys end where queries end")
  both, farthest = options.get("t5", (False, 128))
  module = modeling_t5.T5Attention(
    modeling_t5.T5Config(
      d_model=3 * heads * width, d_kv=width, num_heads=heads, is_decoder=not both,
      relative_attention_num_buckets=len(x["buckets"]), attn_implementation=attention,
      relative_attention_max_distance=farthest,
    ), True, layer_idx=0,
  )  # fmt: skip
  module.q, module.k, module.v, module.o = *map(third, range(3)), torch.nn.Identity()
  cache = cache_utils.DynamicCache()
  cache.update(*(x[name][:, :past].transpose(1, 2) for name in ("key", "value")), 0)
  new = joined(x["query"], x["key"][:, past:], x["value"][:, past:])
  table = {"relative_attention_bias.weight": x["buckets"]}
  y = with_parameters(module, table, new, additive(x, options), cache=cache)[0]
  return y.unflatten(2, (heads, width))


def speech(x, kind, attention, **options):
  """Returns a module of Wav2Vec2's kind."""
  heads, width = x["query"].shape[2:]
  sizes = {"hidden_size": heads * width, "num_attention_heads": heads}
  modeling = {"Bert": modeling_wav2vec2_bert, "Conformer": modeling_wav2vec2_conformer}
  config = getattr(modeling[kind], f"Wav2Vec2{kind}Config")
  config = config(**sizes, attn_implementation=attention, **options)
  module = getattr(modeling[kind], f"Wav2Vec2{kind}SelfAttention")(config)
  module.linear_q, module.linear_k, module.linear_v = map(third, range(3))
  module.linear_out = torch.nn.Identity()
  return module


def conformer_of(x, options, attention):
  is_self_attention(x)
  queries, heads, width = x["query"].shape[1:]
  refuse_if("key_table" not in x, "has positions")
  refuse_if(x["key_table"].shape != (2 * queries - 1, heads, width), "all distances")
  module = speech(x, "Conformer", attention, position_embeddings_type="relative")
  module.linear_pos = torch.nn.Identity()
  zero = torch.zeros(heads, width, dtype=x["query"].dtype)
  names = {"pos_bias_u": "content_bias", "pos_bias_v": "position_bias"}
  biases = {name: x.get(ours, zero) for name, ours in names.items()}
  rows = joined(x["query"], x["key"], x["value"])
  embeddings = x["key_table"].flatten(1)[None]
  y = with_parameters(module, biases, rows, additive(x, options), embeddings)[0]
  return y.unflatten(2, (heads, width))


def wav2vec2_bert_of(x, options, attention):
  is_self_attention(x)
  refuse_if("key_table" not in x, "has positions")
  refuse_if(x["key_table"].ndim > 2, "heads share the table")
  left = options.get("left", len(x["key_table"]) // 2)
  module = speech(
    x, "Bert", attention, position_embeddings_type="relative_key",
    left_max_position_embeddings=left,
    right_max_position_embeddings=len(x["key_table"]) - 1 - left,
  )  # fmt: skip
  table = {"distance_embedding.weight": x["key_table"]}
  rows = joined(x["query"], x["key"], x["value"])
  y = with_parameters(module, table, rows, additive(x, options))[0]
  return y.unflatten(2, x["query"].shape[2:])


def deberta_module(heads, width, distances):
  module = modeling_deberta_v2.DisentangledSelfAttention(
    modeling_deberta_v2.DebertaV2Config(
      hidden_size=heads * width, num_attention_heads=heads, relative_attention=True,
      position_buckets=-1, max_relative_positions=distances,
      pos_att_type=["c2p", "p2c"],
    )
  )  # fmt: skip
  module.query_proj, module.key_proj, module.value_proj = map(third, range(3))
  module.pos_key_proj, module.pos_query_proj = third(0), third(1)
  return module.eval()


def deberta_of(x, options, attention, as_published):
  is_self_attention(x)
  heads, width = x["query"].shape[2:]
  refuse_if("query_table" not in x or "key_table" not in x, "has both tables")
  refuse_if(options.get("scale") != (3 * width) ** -0.5, "its scale is (3 H)**-0.5")
  module = deberta_module(heads, width, len(x["key_table"]) // 2)
  key_rows, query_rows = x["key_table"].flip(0)[None], x["query_table"][None]
  query_rows = query_rows if as_published else query_rows.flip(1)
  embeddings = joined(key_rows, query_rows, key_rows)[0]  # the third is not used
  rows = joined(x["query"], x["key"], x["value"])
  mask = torch.tensor(pair_mask(x, options))
  return module(rows, mask, rel_embeddings=embeddings)[0].unflatten(2, (heads, width))


def llama_of(x, options, attention):
  refuse_if(options["rotary"] != "halves", "turns halves")
  config = modeling_llama.LlamaConfig(head_dim=x["query"].shape[3])
  embedding = modeling_llama.LlamaRotaryEmbedding(config)
  q, k, v = (x[name].transpose(1, 2) for name in ("query", "key", "value"))
  turned = []
  for rows, start in ((q, options.get("query_offset", 0)), (k, 0)):
    at = torch.arange(rows.shape[2])[None] + start
    turned.append(
      modeling_llama.apply_rotary_pos_emb(rows, rows, *embedding(rows, at))[0]
    )
  module = torch.nn.Module()
  module.num_key_value_groups = q.shape[1] // k.shape[1]
  interface = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface(
    attention, modeling_llama.eager_attention_forward
  )
  scale = x["query"].shape[3] ** -0.5
  return interface(module, *turned, v, additive(x, options), scaling=scale)[0]


def bloom_of(x, options, attention):
  is_self_attention(x)
  refuse_if(not options.get("causal"), "is causal: its bias counts from the last key")
  batch, queries, heads, width = x["query"].shape
  config = modeling_bloom.BloomConfig(hidden_size=heads * width, n_head=heads)
  module = modeling_bloom.BloomAttention(config, 0)
  module.query_key_value = module.dense = torch.nn.Identity()
  rows = torch.stack([x["query"], x["key"], x["value"]], 3).flatten(2)
  mask, dtype = torch.ones(batch, queries).long(), x["query"].dtype
  if "mask" in x:
    refuse_if(x["mask"].shape[1:3] != (1, 1), "masks of keys")
    mask = x["mask"][:, 0, 0].long()
  alibi = modeling_bloom.build_alibi_tensor(mask, heads, dtype)
  zero = torch.zeros(batch, queries, heads * width, dtype=dtype)
  y = module.eval()(rows, zero, alibi, additive(x, options))[0]
  return y.unflatten(2, (heads, width))


def mpt_of(x, options, attention):
  is_self_attention(x)
  refuse_if(not options.get("causal"), "is causal: its bias counts from the last key")
  queries, heads, width = x["query"].shape[1:]
  config = modeling_mpt.MptConfig(d_model=heads * width, n_heads=heads)
  module = modeling_mpt.MptAttention(config, 0)
  module.Wqkv = module.out_proj = torch.nn.Identity()
  alibi = modeling_mpt.build_mpt_alibi_tensor(heads, queries).to(x["query"].dtype)
  rows = joined(x["query"], x["key"], x["value"])
  y = module.eval()(rows, alibi, attention_mask=~torch.tensor(pair_mask(x, options)))[0]
  return y.unflatten(2, (heads, width))


def needing(name, function):
  """Returns a function that refuses calls without the module's kind of positions."""

  @functools.wraps(function)
  def attend(arrays, options):
    refuse_if(name not in arrays | options, f"always has {name}")
    return function(arrays, options)

  return attend


XL = ("key_table", "content_bias", "position_bias")
T5 = ("buckets", "t5", "scale", "query_offset")
deberta_as_published = functools.partial(deberta_of, as_published=True)
deberta_as_coded = functools.partial(deberta_of, as_published=False)

t5 = needing("buckets", by("eager", t5_of, *T5))
t5_sdpa = needing("buckets", by("sdpa", t5_of, *T5))
conformer = by("eager", conformer_of, *XL)
conformer_sdpa = by("sdpa", conformer_of, *XL)
wav2vec2_bert = by("eager", wav2vec2_bert_of, "key_table", "left")
wav2vec2_bert_sdpa = by("sdpa", wav2vec2_bert_of, "key_table", "left")
deberta = by("eager", deberta_as_published, "key_table", "query_table", "scale")
deberta_code = by("eager", deberta_as_coded, "key_table", "query_table", "scale")
llama = needing("rotary", by("eager", llama_of, "rotary", "query_offset"))
llama_sdpa = needing("rotary", by("sdpa", llama_of, "rotary", "query_offset"))
bloom = needing("alibi", by("eager", bloom_of, "alibi"))
mpt = needing("alibi", by("eager", mpt_of, "alibi"))
