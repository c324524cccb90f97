"""Tests that the functions of docs/published.md compute what the published modules do.

With --published_out=results/published it also measures memory and writes the record and
the page's table: pytest -n0 -m published --published_out=results/published
"""

import ast
import functools
import importlib
import json
import math
import pathlib
import re
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from alphagenome_attention import apply_original, make_parameters
from published_page import PAGE, code, page

from experiments.evaluation.tables import markdown_table, rewrite_sections
from experiments.files import write_whole
from experiments.training.environment import environment

pytestmark = pytest.mark.published

HEADS, H = 6, 32  # not a power of two: ALiBi's slopes are two sequences
D = HEADS * H
TOKENS, LONG = 576, 4096  # both squares; DeBERTa's last buckets begin at 511
EAGER, FUSED = "eager", "sdpa"


class Case(NamedTuple):
  """A published attention module, and the page's function that computes the same."""

  parameters: dict[str, Any]  # torch.Tensors, by name
  run: Callable  # of the parameters and x, as torch.Tensors
  ours: Callable  # of the parameters and x, as NumPy arrays
  shape: tuple[int, ...] | None  # of x; None is that of tokens

  def arrays(self) -> dict[str, np.ndarray]:
    return {name: values.detach().numpy() for name, values in self.parameters.items()}


class HaikuCase(Case):
  """A case of Haiku: the original is a function of arrays, as ours is."""

  def arrays(self) -> dict[str, np.ndarray]:
    return self.parameters


def case(module, run, ours, shape=None, **others) -> Case:
  """Returns a case with random parameters of a module and others of these shapes."""
  import torch

  parameters = dict(module.eval().named_parameters()) if module else {}
  parameters |= {
    name: torch.zeros(shape, requires_grad=True) for name, shape in others.items()
  }
  torch.manual_seed(0)
  with torch.no_grad():
    for name, values in parameters.items():
      is_matrix = D in values.shape and name not in others
      values.normal_(std=D**-0.5 if is_matrix else 1.0)
  return Case(parameters, run, ours, shape)


@functools.lru_cache(maxsize=1)
def causal(length: int, attention: str, dtype):
  """Returns a causal mask to add, or None: fused attention makes its own."""
  import torch

  mask = torch.full((1, 1, length, length), torch.finfo(dtype).min, dtype=dtype).triu(1)
  return mask if attention == EAGER else None


# The originals, from transformers where it has them
# -----------------------------------------------


def modeling(name: str):
  """Returns a module of transformers."""
  return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def configured(name: str, kind: str, attention: str = EAGER, **options):
  """Returns a module of transformers, and its config of these sizes and options."""
  module, sizes = modeling(name), dict(hidden_size=D, num_attention_heads=HEADS)
  return module, getattr(module, kind)(
    **sizes, attn_implementation=attention, **options
  )


def t5(batch, length, attention, name="T5", is_causal=False):
  m = modeling(name.lower())
  sizes = dict(d_model=D, d_kv=H, num_heads=HEADS, is_decoder=is_causal)
  config = getattr(m, f"{name}Config")(**sizes, attn_implementation=attention)
  module = getattr(m, f"{name}Attention")(
    config, True, layer_idx=0, is_causal=is_causal
  )

  def run(w, x):
    return module(x, causal(length, attention, x.dtype) if is_causal else None)[0]

  return case(module, run, functools.partial(page().t5, is_causal=is_causal))


def bert(batch, length, attention, of_keys=False):
  """Follows BertSelfAttention.forward of transformers 4.57."""
  import torch

  names = "query", "key", "value"
  module = torch.nn.ModuleDict({name: torch.nn.Linear(D, D) for name in names})
  module["distance_embedding"] = torch.nn.Embedding(2 * length - 1, H)

  def run(w, x):
    query, key, value = (
      module[name](x).view(*x.shape[:2], HEADS, H).transpose(1, 2) for name in names
    )
    scores = query @ key.transpose(-1, -2)
    at = torch.arange(length)
    embedding = module["distance_embedding"](at[:, None] - at + length - 1)
    scores = scores + torch.einsum("bhld,lrd->bhlr", query, embedding)
    if of_keys:
      scores = scores + torch.einsum("bhrd,lrd->bhlr", key, embedding)
    return ((scores / math.sqrt(H)).softmax(-1) @ value).transpose(1, 2).flatten(2)

  return case(module, run, functools.partial(page().bert, of_keys=of_keys))


def wav2vec2_bert(batch, length, attention):
  m, config = configured("wav2vec2_bert", "Wav2Vec2BertConfig", attention)
  module = m.Wav2Vec2BertSelfAttention(config)
  return case(module, lambda w, x: module(x)[0], page().wav2vec2_bert)


def conformer(batch, length, attention):
  options = dict(position_embeddings_type="relative")
  m, config = configured(
    "wav2vec2_conformer", "Wav2Vec2ConformerConfig", attention, **options
  )
  module = m.Wav2Vec2ConformerSelfAttention(config)
  positions = m.Wav2Vec2ConformerRelPositionalEmbedding(config)

  def run(w, x):
    return module(x, relative_position_embeddings=positions(x))[0]

  return case(module, run, page().conformer)


def tensor2tensor(batch, length, attention, max_distance=16):
  """Follows dot_product_attention_relative of Tensor2Tensor, and its inner products."""
  import torch

  def run(w, x):
    query, key, value = x.transpose(2, 3)
    at = torch.arange(length)
    rows = (at - at[:, None]).clamp(-max_distance, max_distance) + max_distance

    def inner(x, z):
      return torch.matmul(x.flatten(0, 1).transpose(0, 1), z).transpose(0, 1)

    of_keys, of_values = (
      torch.nn.functional.embedding(rows, w[name]) for name in ("key", "value")
    )
    query = query * H**-0.5
    logits = query @ key.transpose(-1, -2)
    weights = (
      logits + inner(query, of_keys.transpose(1, 2)).view(logits.shape)
    ).softmax(-1)
    of_values = inner(weights, of_values)
    return (weights @ value + of_values.view(value.shape)).transpose(1, 2)

  def ours(w, x):
    return page().tensor2tensor(w, *x)

  rows = 2 * max_distance + 1, H
  return case(None, run, ours, (3, batch, length, HEADS, H), key=rows, value=rows)


def music_transformer(batch, length, attention):
  """Follows section 3.4.1 of Huang et al. 2018: project, pad, reshape, slice."""
  import torch

  def run(w, x):
    query, key, value = x.transpose(2, 3)
    relative = query @ w["key"].permute(1, 2, 0)
    padded = torch.nn.functional.pad(relative, (1, 0))
    shifted = padded.view(batch, HEADS, length + 1, length)[:, :, 1:]
    logits = (query @ key.transpose(-1, -2) + shifted) / math.sqrt(H)
    return ((logits + causal(length, EAGER, x.dtype)).softmax(-1) @ value).transpose(
      1, 2
    )

  def ours(w, x):
    return page().music_transformer(w, *x)

  return case(None, run, ours, (3, batch, length, HEADS, H), key=(length, HEADS, H))


def deberta(batch, length, attention, is_shared):
  import torch

  m, config = configured(
    "deberta_v2",
    "DebertaV2Config",
    relative_attention=True,
    position_buckets=256,
    max_relative_positions=512,
    pos_att_type=["c2p", "p2c"],
    share_att_key=is_shared,
  )
  module = m.DisentangledSelfAttention(config)
  mask = torch.ones(1, 1, 1, 1)

  def run(w, x):
    return module(x, mask, rel_embeddings=w["rel_embeddings"])[0]

  def ours(w, x):
    return page().deberta(w, x, w["rel_embeddings"])

  return case(module, run, ours, rel_embeddings=(512, D))


def gemma4_audio(batch, length, attention):
  import torch

  m, config = configured("gemma4", "Gemma4AudioConfig", use_clipped_linears=False)
  module = m.Gemma4AudioAttention(config, 0)
  encoding = m.Gemma4AudioRelPositionalEncoding(config)
  at = torch.arange(length)
  sees = m.sliding_window_mask_function((config.attention_context_left - 1, 0))
  hidden = ~sees(0, 0, at[:, None], at) * torch.finfo(torch.float32).min
  encoder = types.SimpleNamespace(config=config)
  mask = m.Gemma4AudioModel._convert_4d_mask_to_blocked_5d(encoder, hidden[None, None])

  def run(w, x):
    return module(x, encoding(x), mask)[0]

  waves = encoding(torch.zeros(1, 1))[0].numpy()

  def ours(w, x):
    return page().gemma4_audio(w, x, waves.astype(x.dtype))

  return case(module, run, ours)


def xlnet(batch, length, attention):
  import torch

  m = modeling("xlnet")
  config = m.XLNetConfig(vocab_size=8, d_model=D, n_layer=1, n_head=HEADS, d_inner=8)
  model = m.XLNetModel(config)
  module = model.layer[0].rel_attn
  segments = np.arange(length) // (length // 3)
  differ = torch.tensor(segments[:, None] != segments).long()
  one_hot = (
    torch.nn.functional.one_hot(differ, 2).float()[:, :, None].expand(-1, -1, batch, -1)
  )

  def run(w, x):
    waves = model.relative_positional_encoding(length, length, batch).to(x.dtype)
    of_segments = one_hot.to(x.dtype)
    return module(x.transpose(0, 1), None, None, None, waves, of_segments)[0].transpose(
      0, 1
    )

  def ours(w, x):
    return page().xlnet(w, x, np.broadcast_to(segments, x.shape[:2]))

  return case(module, run, ours)


def bloom(batch, length, attention):
  import torch

  m = modeling("bloom")
  config = m.BloomConfig(hidden_size=D, n_head=HEADS)
  module = m.BloomAttention(config, 0)

  def run(w, x):
    alibi = m.build_alibi_tensor(torch.ones(batch, length).long(), HEADS, x.dtype)
    return module(x, torch.zeros_like(x), alibi, causal(length, EAGER, x.dtype))[0]

  return case(module, run, page().bloom)


def mpt(batch, length, attention):
  m = modeling("mpt")
  module = m.MptAttention(m.MptConfig(d_model=D, n_heads=HEADS), 0)

  def run(w, x):
    bias = m.build_mpt_alibi_tensor(HEADS, length)
    return module(
      x, bias.to(x.dtype), attention_mask=causal(length, EAGER, x.dtype) != 0
    )[0]

  return case(module, run, page().mpt)


def rotary(batch, length, attention, name, kind, ours, **options):
  import torch

  m, config = configured(name, f"{kind}Config", attention, **options)
  module = getattr(m, f"{kind}Attention")(config, 0)
  embedding = getattr(m, f"{kind}RotaryEmbedding")(config)

  def run(w, x):
    mask, positions = (
      causal(length, attention, x.dtype),
      embedding(x, torch.arange(length)[None]),
    )
    return module(x, attention_mask=mask, position_embeddings=positions)[0]

  return case(module, run, ours)


def llama(*sizes, rope, ours):
  longest = int(rope["factor"] * rope["original_max_position_embeddings"])
  options = dict(
    rope_parameters=rope, max_position_embeddings=longest, num_key_value_heads=2
  )
  return rotary(*sizes, "llama", "Llama", ours, **options)


def llama3(*sizes):
  rope = dict(
    rope_type="llama3", rope_theta=500_000.0, low_freq_factor=1.0, high_freq_factor=4.0
  )
  rope |= dict(factor=8.0, original_max_position_embeddings=8192)
  return llama(*sizes, rope=rope, ours=lambda w, x: page().llama(w, x, page().llama3()))


def yarn(*sizes):
  rope = dict(rope_type="yarn", rope_theta=10_000.0)
  rope |= dict(factor=4.0, original_max_position_embeddings=4096)

  def ours(w, x):
    return page().llama(w, x, page().yarn(), 0.1 * math.log(4) + 1)

  return llama(*sizes, rope=rope, ours=ours)


def gpt_neox(*sizes):
  return rotary(*sizes, "gpt_neox", "GPTNeoX", page().gpt_neox)


def swin(batch, length, attention, size=8):
  import torch

  m = modeling("swin")
  module = m.SwinAttention(m.SwinConfig(attn_implementation=attention), D, HEADS, size)
  windows = length // size**2
  seen = np.random.default_rng(0).random((windows, size**2, 1)) < 0.5
  bias = np.where(seen == seen.swapaxes(1, 2), 0.0, -100.0)

  def run(w, x):
    return module(x.flatten(0, 1), torch.tensor(bias, dtype=x.dtype))[0].view(x.shape)

  def ours(w, x):
    return page().swin(w, x, size, bias[:, None])

  return case(module, run, ours, (batch, windows, size**2, D))


def beit(batch, length, attention):
  size = math.isqrt(length)
  m, config = configured("beit", "BeitConfig", attention, image_size=size, patch_size=1)
  module = m.BeitAttention(config)
  module.relative_position_bias = m.BeitRelativePositionBias(config)  # of the layer

  def run(w, x):
    return module(x, module.relative_position_bias((size, size)))[0]

  ours = functools.partial(page().beit, size=size)
  return case(module, run, ours, (batch, size * size + 1, D))


def sam(batch, length, attention):
  size = math.isqrt(length)
  m, config = configured("sam", "SamVisionConfig", image_size=size, patch_size=1)
  module = m.SAM_VISION_ATTENTION_CLASSES[attention](config, window_size=0)
  return case(module, lambda w, x: module(x)[0], page().sam, (batch, size, size, D))


def enformer(batch, length, attention, width=D, **sizes):
  import torch

  m = importlib.import_module("enformer_pytorch.modeling_enformer")
  sizes = dict(heads=HEADS, dim_key=H, dim_value=48, num_rel_pos_features=48) | sizes
  module = m.Attention(width, **sizes)

  def ours(w, x):
    options = module.num_rel_pos_features, "cpu", False, getattr(torch, str(x.dtype))
    return page().enformer(w, x, m.get_positional_embed(length, *options).numpy())

  return case(module, lambda w, x: module(x), ours, (batch, length, width))


def borzoi(batch, length, attention, width=D, **sizes):
  m = importlib.import_module("borzoi_pytorch.pytorch_borzoi_transformer")
  sizes = dict(heads=HEADS, dim_key=H, dim_value=48, num_rel_pos_features=32) | sizes
  module = m.Attention(width, **sizes)
  features = m.get_positional_embed(length, 4096, sizes["num_rel_pos_features"], "cpu")

  def run(w, x):
    module.positions = features.to(x.dtype)
    return module(x)

  def ours(w, x):
    return page().enformer(w, x, features.numpy().astype(x.dtype))

  return case(module, run, ours, (batch, length, width))


def alphagenome(batch, length, attention, width=D, channels=24):
  random = np.random.default_rng(1)
  blocks = length // 16
  pairs = random.standard_normal((batch, blocks, blocks, channels), np.float32)

  def run(w, x):
    w = dict(w)
    return apply_original(w, x, w.pop("pairs"))

  def ours(w, x):
    return page().alphagenome(w, x, w["pairs"])

  parameters = make_parameters(width, channels) | dict(pairs=pairs)
  return HaikuCase(parameters, run, ours, (batch, length, width))


HSTU = "generative_recommenders.research.modeling.sequential.hstu"


def hstu(batch, length, attention):
  import torch

  with warnings.catch_warnings():  # they have invalid escapes, and deprecated calls
    warnings.simplefilter("ignore")
    importlib.import_module("fbgemm_gpu")
    m = importlib.import_module(HSTU)
  buckets = dict(num_buckets=128, bucketization_fn=hstu_bucket)
  bias = m.RelativeBucketedTimeAndPositionBasedBias(length, **buckets)
  sizes = dict(linear_hidden_dim=H, attention_dim=H, num_heads=HEADS)
  options = dict(dropout_ratio=0.0, attn_dropout_ratio=0.0, linear_activation="silu")
  module = m.SequentialTransductionUnitJagged(
    D, **sizes, **options, relative_attention_bias_module=bias
  )
  # Whole minutes: PyTorch and XLA round logarithms differently, so that a time in
  # seconds may be at the end of one bucket or at the beginning of the next.
  minutes = np.random.default_rng(1).geometric(1 / 30, (batch, length))
  times = 60 * np.cumsum(minutes, axis=1)
  starts = torch.arange(0, batch * length + 1, length)
  mask = torch.ones(length, length).tril()

  def run(w, x):
    y, _ = module(x.reshape(-1, D), starts, torch.tensor(times), mask.to(x.dtype))
    return y.reshape(x.shape)

  return case(module, run, lambda w, x: page().hstu(w, x, times))


def hstu_bucket(seconds):
  """Returns the bucket of a torch.Tensor of seconds, as the original's encoder does."""
  import torch

  return (torch.log(torch.abs(seconds).clamp(min=1)) / 0.301).long()


class Row(NamedTuple):
  """A row of the page's table."""

  function: str  # of the page
  make: Callable[..., Case]
  attentions: tuple[str, ...] = (EAGER,)  # that the original has
  # What the original computes in float32 though its weights are in float64; or ALL.
  single: str = ""
  package: str = "transformers"

  def case(self, batch: int, length: int, attention: str) -> Case:
    case = self.make(batch, length, attention)
    return case._replace(shape=case.shape or (batch, length, D))


BOTH = (EAGER, FUSED)
ALL = "all"  # of a module that takes no float64
ROWS = {}
ROWS["BERT, `relative_key`"] = Row("bert", bert)
of_keys = functools.partial(bert, of_keys=True)
ROWS["BERT, `relative_key_query`"] = Row("bert", of_keys)
ROWS["Wav2Vec2-BERT"] = Row("wav2vec2_bert", wav2vec2_bert, BOTH)
ROWS["Tensor2Tensor"] = Row("tensor2tensor", tensor2tensor)
ROWS["Music Transformer"] = Row("music_transformer", music_transformer)
for version, is_shared in (("v2", False), ("v3", True)):
  make = functools.partial(deberta, is_shared=is_shared)
  ROWS[f"DeBERTa {version}"] = Row("deberta", make, single="scale")
ROWS["Gemma 4's audio encoder"] = Row("gemma4_audio", gemma4_audio, single=ALL)
ROWS["Wav2Vec2-Conformer"] = Row("conformer", conformer, BOTH, "sinusoids")
ROWS["XLNet"] = Row("xlnet", xlnet, single="sinusoids")
ROWS["T5, encoder"] = Row("t5", t5, BOTH)
ROWS["T5, decoder"] = Row("t5", functools.partial(t5, is_causal=True), BOTH)
ROWS["umT5"] = Row("t5", functools.partial(t5, name="UMT5"), BOTH)
ROWS["BLOOM"] = Row("bloom", bloom, single="softmax")
ROWS["MPT"] = Row("mpt", mpt, single="softmax")
ROWS["Llama 3.1"] = Row("llama", llama3, BOTH, "angles")
ROWS["Llama with YaRN"] = Row("llama", yarn, BOTH, "angles")
ROWS["GPT-NeoX"] = Row("gpt_neox", gpt_neox, BOTH, "angles")
ROWS["Swin"] = Row("swin", swin, BOTH)
ROWS["BEiT"] = Row("beit", beit, BOTH)
ROWS["SAM"] = Row("sam", sam, BOTH)
ROWS["Enformer"] = Row("enformer", enformer, package="enformer_pytorch")
ROWS["Borzoi"] = Row("enformer", borzoi, package="borzoi_pytorch")
ROWS["AlphaGenome"] = Row(
  "alphagenome", alphagenome, single=ALL, package="alphagenome_research"
)
ROWS["HSTU"] = Row("hstu", hstu, single=ALL, package="generative_recommenders")


# Errors and memory
# --------------------------------------------------------------------------------


def with_gradients(ours):
  """Returns the function of w, x and dy that returns y and the gradients of w and x."""

  def function(w, x, dy):
    y, backward = jax.vjp(ours, w, x)
    return y, backward(dy)

  return jax.jit(function)


def run_original(case: Case, x, dtype: str):
  """Returns y, its cotangent, and the gradients of the parameters and of x."""
  if isinstance(case, HaikuCase):
    for name, values in case.parameters.items():
      case.parameters[name] = values.astype(dtype)
    y, backward = jax.vjp(case.run, case.parameters, x)
    dy = np.random.default_rng(1).standard_normal(y.shape).astype(dtype)
    gradients, of_x = backward(dy)
    return y, dy, gradients | {"input x": of_x}
  import torch

  for values in case.parameters.values():
    values.data = values.data.to(getattr(torch, dtype))
  x = torch.tensor(x, requires_grad=True)
  y = case.run(case.parameters, x)
  dy = np.random.default_rng(1).standard_normal(tuple(y.shape)).astype(dtype)
  y.backward(torch.tensor(dy))
  gradients = {name: values.grad.numpy() for name, values in case.parameters.items()}
  return y.detach().numpy(), dy, gradients | {"input x": x.grad.numpy()}


def errors(row: Row, dtype: str) -> tuple[float, float]:
  """Returns the largest errors of output and gradients, over their largest values."""
  case = row.case(2, TOKENS, row.attentions[-1 if dtype == "float64" else 0])
  x = np.random.default_rng(0).standard_normal(case.shape).astype(dtype)
  y, dy, truth = run_original(case, x, dtype)
  our_y, (our_w, our_x) = with_gradients(case.ours)(case.arrays(), x, dy)
  assert our_y.dtype == dtype
  largest = max(abs(values).max() for values in truth.values())
  of_gradients = []
  for name, values in (our_w | {"input x": our_x}).items():
    scale = max(abs(truth[name]).max(), largest / 100)
    of_gradients.append(abs(values - truth[name]).max() / scale)
  return float(abs(our_y - y).max() / abs(y).max()), float(max(of_gradients))


def output_shape(case: Case) -> jax.ShapeDtypeStruct:
  return jax.eval_shape(case.ours, case.arrays(), np.zeros(case.shape, np.float32))


def compiled_memory(function, case: Case) -> int:
  """Returns the bytes of both passes beyond weights and inputs, by the compiler."""
  x = np.zeros(case.shape, np.float32)
  arguments = case.arrays(), x, output_shape(case)
  program = with_gradients(function).lower(*arguments).compile()
  used = program.memory_analysis()
  return used.temp_size_in_bytes + used.output_size_in_bytes


def memory(row: Row, length: int = LONG) -> dict[str, int]:
  """Returns the bytes of both passes beyond weights and inputs, by program."""
  found = row.case(1, length, row.attentions[0])
  sizes = dict(ours=compiled_memory(found.ours, found))
  if isinstance(found, HaikuCase):
    return sizes | {EAGER: compiled_memory(found.run, found)}
  import torch

  for attention in row.attentions:
    found = row.case(1, length, attention)
    x = torch.zeros(found.shape, requires_grad=True)
    dy = torch.zeros(output_shape(found).shape)
    causal(length, attention, x.dtype)  # models make it once for all layers
    with torch.profiler.profile(
      activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
      found.run(found.parameters, x).backward(dy)
    events = [
      x for x in profile.profiler.kineto_results.events() if x.name() == "[memory]"
    ]
    events.sort(key=lambda event: event.start_ns())
    sizes[attention] = int(np.cumsum([event.nbytes() for event in events]).max())
  return sizes


def record_rows(request, name, page, section, make_table):
  """Yields a dictionary for rows; they are written if there is --published_out."""
  rows: dict[str, Any] = {}
  yield rows
  folder = request.config.option.published_out
  if folder and rows:
    where = write_record(folder, name, rows)
    rewrite_sections(page, {section: make_table(where, rows)})


@pytest.fixture(scope="module")
def record(request):
  """Returns a dictionary for results."""
  yield from record_rows(request, "cpu.json", PAGE, "published", table)


def write_record(folder: str, name: str, results) -> dict[str, Any]:
  """Writes results with their environment; returns the environment."""
  where = environment("torch", "transformers", "dm-haiku")
  content = json.dumps({"environment": where, "rows": results}, indent=1) + "\n"
  file = pathlib.Path(folder, name)
  file.parent.mkdir(parents=True, exist_ok=True)
  write_whole(file, content)
  return where


HEADER = [
  "model",
  "function, lines",
  "float32: output",
  "gradients",
  "float64: output",
  "gradients",
  "original in float32",
  "MiB, ours",
  "original, eager",
  "original, sdpa",
]


def lines_of_functions() -> dict[str, int]:
  """Returns how many lines each function of the page has."""
  lines = {}
  for node in ast.parse(code()).body:
    if isinstance(node, ast.FunctionDef):
      lines[node.name] = node.end_lineno - node.body[0].lineno + 1
  return lines


def table_row(name: str, results, lines) -> list[str]:
  row = ROWS[name]
  cells = [name, f"`{row.function}`, {lines[row.function]}"]
  cells += [f"{error:.0e}" for error in results["float32"]]
  cells += [f"{error:.0e}" for error in results.get("float64", ())] or ["-", "-"]
  cells.append(row.single or "-")
  for attention in ("ours", EAGER, FUSED):
    size = results["memory"].get(attention)
    cells.append("-" if size is None else f"{size / 2**20:,.0f}")
  return cells


def table(where, rows) -> str:
  """Returns the page's table."""
  lines = lines_of_functions()
  cells = [table_row(name, results, lines) for name, results in rows.items()]
  source = source_line(where, "jax", "torch", "transformers")
  return f"{source}\n\n{markdown_table(HEADER, cells)}"


def source_line(where, *packages) -> str:
  """Returns where and how a table was measured."""
  versions = ", ".join(f"{name} {where['packages'][name]}" for name in packages)
  return f"{where['date'][:10]}, {where['cpu']}, {versions}, `{where['command']}`."


@pytest.mark.parametrize("name", ROWS)
def test_the_page_computes_what_the_published_module_does(name, record, request):
  row = ROWS[name]
  pytest.importorskip(
    row.package, reason="needs the extra: pip install -e '.[published]'"
  )
  results = {"float32": errors(row, "float32")}
  assert max(results["float32"]) < 3e-5
  if row.single != ALL:
    with jax.enable_x64(True):
      results["float64"] = errors(row, "float64")
    assert max(results["float64"]) < (1e-5 if row.single else 1e-12)
  if request.config.option.published_out:
    record[name] = results | {"memory": memory(row)}


# Models of DNA
# --------------------------------------------------------------------------------


GENOMICS = PAGE.with_name("genomics.md")
# Attention at the sizes of the published models, and their numbers of base pairs.
OF_DNA = {
  "Enformer": (196_608, 1536, functools.partial(enformer, num_rel_pos_features=192)),
  "Borzoi": (524_288, 4096, functools.partial(borzoi, num_rel_pos_features=32)),
  "AlphaGenome": (1_048_576, 8192, functools.partial(alphagenome, channels=128)),
}
TRANSFORMER_XL = dict(heads=8, dim_key=64, dim_value=192)


@pytest.fixture(scope="module")
def sizes_of_dna(request):
  """Returns a dictionary for bytes."""
  yield from record_rows(request, "genomics.json", GENOMICS, "memory", table_of_dna)


def table_of_dna(where, rows) -> str:
  """Returns the table of docs/genomics.md."""
  header = ["model", "base pairs", "positions", "MiB, original", "MiB, ours"]
  cells = []
  for name, sizes in rows.items():
    base_pairs, positions, _ = OF_DNA[name]
    both = (f"{sizes[x] / 2**20:,.0f}" for x in (EAGER, "ours"))
    cells.append([name, f"{base_pairs:,}", f"{positions:,}", *both])
  return f"{markdown_table(header, cells)}\n\n{source_line(where, 'jax', 'torch')}"


@pytest.mark.parametrize("name", OF_DNA)
def test_the_attention_of_a_model_of_dna_takes_less_memory(
  name, sizes_of_dna, monkeypatch
):
  pytest.importorskip(ROWS[name].package)
  monkeypatch.setitem(page().heads.__globals__, "H", 64)
  _, positions, make = OF_DNA[name]
  make = functools.partial(make, width=1536)
  if name != "AlphaGenome":
    make = functools.partial(make, **TRANSFORMER_XL)
  sizes_of_dna[name] = memory(Row("", make), positions)
  assert sizes_of_dna[name]["ours"] < sizes_of_dna[name][EAGER] / 3


@functools.cache
def features_of_page() -> types.SimpleNamespace:
  """Returns the functions of docs/genomics.md."""
  names: dict[str, Any] = {}
  for block in re.findall(r"(?ms)^```python\n(.*?)^```", GENOMICS.read_text("utf-8")):
    exec(block, names)
  return types.SimpleNamespace(**names)


def test_the_features_of_enformer():
  m = pytest.importorskip("enformer_pytorch.modeling_enformer")
  theirs = m.get_positional_embed(1536, 192, "cpu", use_tf_gamma=True)
  ours = features_of_page().enformer_features(1536)
  exponential, central, gamma = np.split(abs(ours - theirs.numpy())[:, :96], 3, axis=1)
  assert exponential.max() < 1e-6 and not central.any()
  assert gamma.max() < 1e-2  # both round large exponents


@pytest.mark.parametrize("length", [192, 4096])
def test_the_features_of_borzoi(length):
  m = pytest.importorskip("borzoi_pytorch.pytorch_borzoi_transformer")
  theirs = m.get_positional_embed(length, 4096, 32, "cpu")
  np.testing.assert_array_equal(features_of_page().borzoi_features(length), theirs)
