"""Lists the cases. Each names a report or a law, inputs, and what has to hold.

A tuple is the shape of an array. Its values are drawn from a normal distribution; the
seed depends on the case's name. README.md lists the names of arrays and options.
"""

import dataclasses
import zlib
from collections.abc import Callable

import laws
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
  """Describes a case."""

  name: str
  source: str  # the paper, the report, or the number of a law in docs/laws.md
  symptom: str  # what goes wrong in the report, or without the law
  arrays: dict
  options: dict = dataclasses.field(default_factory=dict)
  law: Callable = laws.equals_the_paper
  dtype: str | None = None  # where the case is about one

  def draw(self, dtype):
    """Returns read-only arrays, the same in every run; floats in the dtype."""
    generator = np.random.default_rng(zlib.crc32(self.name.encode()))
    arrays = {}
    for name, values in self.arrays.items():
      if isinstance(values, tuple):
        values = generator.standard_normal(values)
      is_float = values.dtype.kind == "f"
      arrays[name] = values.astype(self.dtype or dtype if is_float else values.dtype)
      arrays[name].flags.writeable = False
    return arrays


def tokens(T=11, S=None, N=4, K=None, B=2, H=8, V=None):
  """Returns the shapes of queries, keys, values and the cotangent of the output."""
  S, K, V = S or T, K or N, V or H
  return {
    "query": (B, T, N, H),
    "key": (B, S, K, H),
    "value": (B, S, K, V),
    "cotangent": (B, T, N, V),
  }


def window_mask(T, S, left, right):
  """Returns a mask [1, 1, T, S] of keys from `left` before to `right` after a query."""
  distance = np.arange(S) - np.arange(T)[:, None]
  return ((distance >= -left) & (distance <= right))[None, None]


def random_mask(*shape):
  """Returns a random mask in which each query has a key."""
  mask = np.random.default_rng(0).random(shape) < 0.5
  return mask | np.eye(*shape[-2:], dtype=bool)


def key_mask(*lengths, keys):
  """Returns the mask [B, 1, 1, S] of sequences of these lengths."""
  return (np.arange(keys) < np.array(lengths)[:, None])[:, None, None]


def low_bias(low):
  """Returns a bias [1, 1, 11, 11] that is `low` for query 3, from key 4 on."""
  bias = np.zeros((1, 1, 11, 11))
  bias[..., 3, 4:] = low
  return bias


def rolled(T, window):
  """Returns key positions of a cache of `window` slots after T tokens, [S]."""
  return np.array([max(range(slot, T, window)) for slot in range(window)])


def edge_labels():
  """Returns labels of edges 1 -> 0, 2 -> 0, 1 -> 2 by receiver and sender, or -1."""
  labels = np.full((2, 3, 3), -1)
  for label, (sender, receiver) in enumerate([(1, 0), (2, 0), (1, 2)]):
    labels[:, receiver, sender] = label
  return labels


SHAW = {"key_table": (7, 8), "value_table": (7, 8)}  # clipped at 3, H 8
BOTH_WAYS = (True, 128)
BACK = (False, 128)
SEGMENTS = np.repeat([0, 1], [9, 11])[None].repeat(2, 0)
# Query 3 of sequence 1 has no keys.
NO_KEYS = window_mask(4, 4, 1, 0) & key_mask(4, 2, keys=4)

CASES = [
  # Scale, heads and shapes
  Case(
    name="plain",
    source="Vaswani et al. 2017, equation 1",
    symptom="attention itself is not what it should be",
    arrays=tokens(S=7),
  ),
  Case(
    name="scale given",
    source="OpenNMT/CTranslate2#123",
    symptom="a scale is ignored, or applied twice",
    arrays=tokens(),
    options={"scale": 0.7},
  ),
  Case(
    name="scale covers the relative term",
    source="OpenNMT/CTranslate2#123",
    symptom="the scale misses the relative term of the keys",
    arrays=tokens() | {"key_table": (7, 8)},
    options={"scale": 0.7},
  ),
  Case(
    name="one key head",
    source="OpenNMT/CTranslate2#1443",
    symptom="relative tables with one key head give a wrong shape",
    arrays=tokens(K=1) | SHAW,
  ),
  Case(
    name="grouped heads are consecutive",
    source="onnx/onnx#7274; FlashML-org/FreeToken#177",
    symptom="key heads are tiled where consecutive query heads share one",
    arrays=tokens(N=6, K=2),
  ),
  Case(
    name="narrow values",
    source="docs/operator.md: values of any width",
    symptom="the width of values is taken for that of keys",
    arrays=tokens(V=5),
  ),
  Case(
    name="batch equals its sequences",
    source="law 12; line/lighthouse#77",
    symptom="the mask of one sequence is used for another's heads",
    arrays=tokens() | {"mask": random_mask(2, 1, 11, 11)},
    law=laws.sequences_one_by_one,
  ),
  # Masks and biases
  Case(
    name="mask by query",
    source="google-research/tabfm#40",
    symptom="the first row of a chunk's mask is used for all of its queries",
    arrays=tokens(T=256, N=2, B=1, H=4) | {"mask": window_mask(256, 256, 999, 50)},
  ),
  Case(
    name="mask by head",
    source="line/lighthouse#77",
    symptom="masks [B, N] are laid out as [N, B]",
    arrays=tokens() | {"mask": random_mask(2, 4, 11, 11)},
  ),
  Case(
    name="mask of keys alone",
    source="jax-ml/jax#28974",
    symptom="a mask [B, 1, 1, S] is refused",
    arrays=tokens(T=7) | {"mask": key_mask(7, 3, keys=7)},
  ),
  Case(
    name="masked keys are inert",
    source="law 5",
    symptom="padding changes the output",
    arrays=tokens() | {"mask": key_mask(11, 6, keys=11)},
    law=laws.masked_keys_are_inert,
  ),
  Case(
    name="bias of all axes",
    source="NVIDIA/TransformerEngine#2537",
    symptom="gradients of a bias other than [1, N, T, S] are wrong",
    arrays=tokens(S=9) | {"bias": (2, 4, 11, 9)},
  ),
  Case(
    name="bias by head and pair, causal",
    source="NVIDIA/cuEquivariance#295; jax-ml/jax#30593",
    symptom="the gradient of a bias is refused or not summed over the batch",
    arrays=tokens() | {"bias": (1, 4, 11, 11)},
    options={"causal": True},
  ),
  Case(
    name="bias by key",
    source="google-research/tabfm#40; jax-ml/jax#23701",
    symptom="gradients are not summed over the axes of a broadcast bias",
    arrays=tokens() | {"bias": (2, 1, 1, 11)},
  ),
  Case(
    name="bias by query",
    source="google-research/tabfm#40",
    symptom="a bias with a last axis of 1 crashes",
    arrays=tokens() | {"bias": (2, 4, 11, 1)},
  ),
  Case(
    name="bias and mask",
    source="docs/operator.md: bias and mask",
    symptom="one of the two is dropped once both are given",
    arrays=tokens() | {"bias": (1, 4, 11, 11), "mask": random_mask(2, 1, 11, 11)},
  ),
  Case(
    name="zero cotangent in half precision",
    source="erfanzar/jax-flash-attn2#1",
    symptom="a cotangent of zeros gives gradients that are not zero, or NaN",
    arrays=tokens(T=33),
    options={"causal": True},
    law=laws.zero_for_zero,
    dtype="float16",
  ),
  Case(
    name="bias of -inf",
    source="law 15; huggingface/transformers#17437",
    symptom="-inf in a bias gives NaN",
    arrays=tokens() | {"bias": low_bias(-np.inf)},
  ),
  Case(
    name="bias of the lowest number",
    source="law 15; huggingface/transformers#17437",
    symptom="finfo.min plus a logit overflows",
    arrays=tokens() | {"bias": low_bias(-3.4028235e38)},
    dtype="float32",
  ),
  # A query that attends to nothing
  Case(
    name="no key: gradients of the others",
    source="pytorch/pytorch#41508, #196170",
    symptom="one query without keys makes every gradient NaN",
    arrays=tokens(T=4) | {"mask": NO_KEYS},
    law=laws.equals_the_paper_where_attended,
  ),
  Case(
    name="no key: zero output",
    source="pytorch/pytorch#131060; tracel-ai/burn#4697; robertknight/rten#1321",
    symptom="a query without keys gets NaN, or the mean of all values",
    arrays=tokens(T=4) | {"mask": NO_KEYS},
  ),
  Case(
    name="queries before all keys",
    source="Dao-AILab/flash-attention#1778; ml-explore/mlx#2967",
    symptom="queries before the first key attend to keys",
    arrays=tokens(T=9, S=5),
    options={"causal": True, "query_offset": -4},
  ),
  # Causal, windows and offsets
  Case(
    name="causal",
    source="law 5",
    symptom="a query attends to later keys",
    arrays=tokens(),
    options={"causal": True},
  ),
  Case(
    name="causal: no gradient from later keys",
    source="law 5",
    symptom="a later key gets a gradient",
    arrays=tokens(),
    options={"causal": True},
    law=laws.later_keys_get_no_gradient,
  ),
  Case(
    name="causal, aligned at the start",
    source="pytorch/pytorch#103082; pytorch/executorch#22426",
    symptom="fewer queries than keys: they are taken for the last",
    arrays=tokens(T=5, S=11),
    options={"causal": True},
  ),
  Case(
    name="causal, aligned at the end",
    source="pytorch/pytorch#103082; Dao-AILab/flash-attention#517",
    symptom="fewer queries than keys: they are taken for the first",
    arrays=tokens(T=5, S=11),
    options={"causal": True, "query_offset": 6},
  ),
  Case(
    name="causal and a mask",
    source="enpasos/jax2onnx#217; google/flax#5093",
    symptom="the causal flag is ignored once a mask is given",
    arrays=tokens() | {"mask": random_mask(2, 1, 11, 11)},
    options={"causal": True},
  ),
  Case(
    name="causal, padded on the left",
    source="Blaizzy/mlx-vlm#1946; huggingface/transformers#45511",
    symptom="padding is attended to, or the queries at padding give NaN",
    arrays=tokens() | {"mask": ~key_mask(0, 4, keys=11)},
    options={"causal": True},
    law=laws.equals_the_paper_where_attended,
  ),
  Case(
    name="decoding one by one",
    source="google/flax#5591",
    symptom="with a padded cache a step attends to slot 0 alone",
    arrays=tokens(T=7),
    options={"causal": True},
    law=laws.queries_one_by_one,
  ),
  Case(
    name="decoding one by one, Shaw",
    source="law 6; google/flax#5591",
    symptom="distances are counted from the wrong end of the cache",
    arrays=tokens(T=7) | SHAW,
    options={"causal": True},
    law=laws.queries_one_by_one,
  ),
  Case(
    name="decoding one by one, T5",
    source="keras-team/keras-hub#2932; huggingface/candle#899",
    symptom="the query is taken for the last slot of a padded cache",
    arrays=tokens(T=7) | {"buckets": (32, 4)},
    options={"causal": True, "t5": BACK, "scale": 1.0},
    law=laws.queries_one_by_one,
  ),
  Case(
    name="decoding one by one, ALiBi",
    source="keras-team/keras-hub#2977, #2861",
    symptom="the bias is of the queries' length, and adds nothing",
    arrays=tokens(T=7),
    options={"causal": True, "alibi": True},
    law=laws.queries_one_by_one,
  ),
  Case(
    name="window of four keys",
    source="huggingface/transformers#39408; ml-explore/mlx-lm#390",
    symptom="a window has one key too many or too few",
    arrays=tokens(),
    options={"causal": True, "window": (3, 0)},
  ),
  Case(
    name="window on both sides",
    source="huggingface/transformers#47010; jax-ml/jax#39576, #32300",
    symptom="the right end of a window is off by one, or open; or there is no window",
    arrays=tokens(),
    options={"window": (3, 2)},
  ),
  Case(
    name="window, more queries than keys",
    source="docs/conformance_reports.md: tokamax",
    symptom="the limits of the window have as many rows as there are keys",
    arrays=tokens(T=12, S=9),
    options={"window": (4, 4)},
  ),
  Case(
    name="window and a mask",
    source="enpasos/jax2onnx#217",
    symptom="the window is ignored once a mask is given",
    arrays=tokens() | {"mask": random_mask(2, 1, 11, 11)},
    options={"window": (3, 2)},
  ),
  Case(
    name="rolling cache",
    source="huggingface/transformers#37574, #47708; rajveer43/VeloxQuant-MLX#389",
    symptom="a slot is taken for a position once the cache has wrapped",
    arrays=tokens(T=1, S=8)
    | SHAW
    | {"query_positions": np.array([28]), "key_positions": rolled(29, 8)},
    options={"causal": True},
  ),
  # Packed sequences
  Case(
    name="segments",
    source="huggingface/nanoVLM#204; allenai/open-instruct#669",
    symptom="a packed sequence attends to its neighbour",
    arrays=tokens(T=20) | {"query_segments": SEGMENTS, "key_segments": SEGMENTS},
  ),
  Case(
    name="segments and a mask of ones",
    source="huggingface/transformers#46634; axolotl-ai-cloud/axolotl#1375",
    symptom="segments are dropped once a mask is given",
    arrays=tokens(T=20)
    | {"query_segments": SEGMENTS, "key_segments": SEGMENTS}
    | {"mask": np.ones((2, 1, 1, 20), bool)},
    options={"causal": True},
  ),
  # Sinks and soft caps
  Case(
    name="sinks",
    source="ROCm/rocm-libraries#12229",
    symptom="the sink is counted twice or never in the sum, or has no gradient",
    arrays=tokens() | {"sinks": (4,)},
    options={"causal": True},
  ),
  Case(
    name="a sink is a key of value zero",
    source="law 14",
    symptom="the sink is scaled",
    arrays=tokens() | {"sinks": (4,)},
    law=laws.a_sink_is_a_key,
  ),
  Case(
    name="sinks, and a query without keys",
    source="law 14",
    symptom="the sink is masked with the keys: NaN, or the mean of all values",
    arrays=tokens(T=4) | {"sinks": (4,), "mask": NO_KEYS},
  ),
  Case(
    name="sinks of -inf",
    source="law 14",
    symptom="sinks of -inf give NaN",
    arrays=tokens(),
    law=laws.low_sinks_change_nothing,
  ),
  Case(
    name="soft cap before the mask",
    source="onnx/onnx#7865; Dao-AILab/flash-attention#1025",
    symptom="masked keys get weight: the cap turns -inf into a number",
    arrays=tokens() | {"mask": random_mask(2, 1, 11, 11)},
    options={"soft_cap": 1.0, "scale": 1.0},
  ),
  Case(
    name="soft cap of large logits",
    source="vllm-project/vllm#56579",
    symptom="the hyperbolic tangent overflows",
    arrays=tokens(),
    options={"soft_cap": 1.0, "scale": 50.0},
  ),
  # Shaw et al. 2018
  Case(
    name="Shaw",
    source="Shaw et al. 2018, equations 3 and 4",
    symptom="the term of keys or of values is wrong",
    arrays=tokens() | SHAW,
  ),
  Case(
    name="Shaw, keys alone",
    source="huggingface/transformers#17026",
    symptom="distances beyond the table raise, or are not clipped",
    arrays=tokens() | {"key_table": (7, 8)},
  ),
  Case(
    name="Shaw, table of all distances",
    source="Shaw et al. 2018, equation 3",
    symptom="the table is read in the other direction",
    arrays=tokens() | {"key_table": (21, 8)},
  ),
  Case(
    name="Shaw, a table for each head",
    source="Huang et al. 2018, section 3.4",
    symptom="the heads of the table are mixed up",
    arrays=tokens() | {"key_table": (7, 4, 8), "value_table": (7, 4, 8)},
    options={"causal": True},
  ),
  Case(
    name="Shaw, all distances, a table for each head",
    source="labmlai/annotated_deep_learning_paper_implementations#185",
    symptom="the shift is off by a row",
    arrays=tokens() | {"key_table": (21, 4, 8)},
    options={"causal": True},
  ),
  Case(
    name="Shaw, 8 back and 3 ahead",
    source="docs/operator.md: left",
    symptom="the row of distance 0 is taken for the middle",
    arrays=tokens(T=16) | {"key_table": (12, 8)},
    options={"left": 8},
  ),
  Case(
    name="nothing beyond the table",
    source="Huang et al. 2018, section 3.4.1",
    symptom="garbage of the skew above the diagonal or below the table",
    arrays=tokens() | {"key_table": (4, 4, 8)},
    options={"left": 3, "beyond": "zero", "causal": True},
  ),
  Case(
    name="table of one row",
    source="law 3",
    symptom="k = 0 raises, or the constant of the values is lost",
    arrays=tokens() | {"key_table": (1, 8), "value_table": (1, 8)},
  ),
  Case(
    name="end rows repeat",
    source="law 7",
    symptom="the far field differs from the lookup",
    arrays=tokens(T=16) | SHAW,
    law=laws.ends_repeat,
  ),
  Case(
    name="reversed with its tables",
    source="law 9",
    symptom="the distance has no sign",
    arrays=tokens() | SHAW,
    law=laws.reverses_with_its_tables,
  ),
  Case(
    name="permuted with its positions",
    source="law 4",
    symptom="slots are taken for positions",
    arrays=tokens() | SHAW,
    law=laws.permutes_with_its_tokens,
  ),
  Case(
    name="labels of distances",
    source="law 8",
    symptom="labels are read by [key, query]",
    arrays=tokens(S=9) | SHAW,
    law=laws.labels_of_distances,
  ),
  Case(
    name="labels of edges",
    source="Snapchat/GiGL#675",
    symptom="edges have the other direction; pairs without an edge take label 0",
    arrays=tokens(T=3)
    | {"key_table": (3, 8), "value_table": (3, 8)}
    | {"labels": edge_labels()},
  ),
  Case(
    name="last queries, Shaw",
    source="lucidrains/x-transformers#103, #153; OpenNMT/CTranslate2#1394",
    symptom="positions are counted from the first key",
    arrays=tokens(T=5, S=23) | SHAW,
    options={"query_offset": 18},
  ),
  Case(
    name="Shaw, a second call is fresh",
    source="google-research/maxvit#7; lucidrains/rotary-embedding-torch#11",
    symptom="the looked-up table or its positions are a copy made in the first call",
    arrays=tokens() | SHAW,
    law=laws.is_fresh,
  ),
  Case(
    name="Shaw in half precision, far away",
    source="law 20; vllm-project/vllm#945",
    symptom="the result depends on absolute positions",
    arrays=tokens(T=16) | SHAW,
    law=laws.depends_on_distances,
    dtype="float16",
  ),
  # DeBERTa
  Case(
    name="DeBERTa",
    source="microsoft/DeBERTa#162; nntrainer/nntrainer#3982",
    symptom="position-to-content is indexed by the other direction",
    arrays=tokens(T=12) | {"key_table": (25, 4, 8), "query_table": (25, 4, 8)},
    options={"scale": 24**-0.5},
  ),
  Case(
    name="DeBERTa, more queries than keys",
    source="microsoft/DeBERTa#33; mead-ml/mead-baseline#759",
    symptom="crashes in the lookup of position-to-content",
    arrays=tokens(T=47, S=19, N=2) | {"key_table": (9, 2, 8), "query_table": (9, 2, 8)},
    options={"scale": 24**-0.5},
  ),
  # Transformer-XL and Conformer
  Case(
    name="Transformer-XL, both directions",
    source="espnet/espnet#2684; ZhengkunTian/OpenTransformer#25",
    symptom="past and future share an encoding; the shift mixes rows",
    arrays=tokens()
    | {"key_table": (21, 4, 8), "content_bias": (4, 8), "position_bias": (4, 8)},
  ),
  Case(
    name="Transformer-XL, causal",
    source="labmlai/annotated_deep_learning_paper_implementations#185",
    symptom="the shift is off by a row",
    arrays=tokens()
    | {"key_table": (21, 4, 8), "content_bias": (4, 8), "position_bias": (4, 8)},
    options={"causal": True},
  ),
  Case(
    name="Transformer-XL, padded",
    source="TensorSpeech/TensorFlowASR#161; wenet-e2e/wenet#1611",
    symptom="columns at the right belong to other rows",
    arrays=tokens()
    | {"key_table": (21, 4, 8), "content_bias": (4, 8), "position_bias": (4, 8)}
    | {"mask": key_mask(11, 6, keys=11)},
  ),
  # T5
  Case(
    name="T5, encoder",
    source="huggingface/candle#1312; lucidrains/x-transformers#10",
    symptom="the bucket lacks its minimum, or the halves are swapped",
    arrays=tokens(T=160, N=2, B=1, H=4) | {"buckets": (32, 2)},
    options={"t5": BOTH_WAYS, "scale": 1.0},
  ),
  Case(
    name="T5, decoder",
    source="huggingface/candle#1312; lucidrains/x-transformers#10",
    symptom="later keys have buckets of their own",
    arrays=tokens(T=160, N=2, B=1, H=4) | {"buckets": (32, 2)},
    options={"t5": BACK, "scale": 1.0, "causal": True},
  ),
  Case(
    name="T5, few buckets",
    source="huggingface/candle#727",
    symptom="numbers other than 32 and 128 are ignored, or rounded otherwise",
    arrays=tokens(T=40, N=2, B=1) | {"buckets": (8, 2)},
    options={"t5": (True, 20), "scale": 1.0},
  ),
  Case(
    name="T5, permuted with its positions",
    source="law 4",
    symptom="slots are taken for positions",
    arrays=tokens() | {"buckets": (32, 4)},
    options={"t5": BOTH_WAYS, "scale": 1.0},
    law=laws.permutes_with_its_tokens,
  ),
  Case(
    name="T5, last queries",
    source="huggingface/candle#899; NVIDIA/TensorRT-LLM#13870",
    symptom="with a cache the bias is dropped, or that of the first queries",
    arrays=tokens(T=5, S=23) | {"buckets": (32, 4)},
    options={"t5": BACK, "scale": 1.0, "causal": True, "query_offset": 18},
  ),
  Case(
    name="T5 in half precision, far away",
    source="law 20; NVIDIA/TensorRT-Model-Connect#667",
    symptom="the result depends on absolute positions",
    arrays=tokens(T=16) | {"buckets": (32, 4)},
    options={"t5": BOTH_WAYS, "scale": 1.0},
    law=laws.depends_on_distances,
    dtype="float16",
  ),
  # ALiBi
  Case(
    name="ALiBi",
    source="Dao-AILab/flash-attention#540; mosaicml/llm-foundry#186",
    symptom="the bias grows with the distance",
    arrays=tokens(N=8),
    options={"alibi": True, "causal": True},
  ),
  Case(
    name="ALiBi in both directions",
    source="meta-pytorch/attention-gym#86",
    symptom="later keys are favoured: the distance has a sign",
    arrays=tokens(T=9)
    | {"query": np.zeros((2, 9, 4, 8)), "key": np.zeros((2, 9, 4, 8))},
    options={"alibi": True},
  ),
  Case(
    name="ALiBi of 6 heads",
    source="ml-explore/mlx#3071; baichuan-inc/Baichuan2#225",
    symptom="one geometric sequence is used for any number of heads",
    arrays=tokens(N=6),
    options={"alibi": True, "causal": True},
  ),
  Case(
    name="ALiBi of 20 heads",
    source="paiml/aprender#2143; ofirpress/attention_with_linear_biases#17",
    symptom="the exponents of the second sequence are off by one",
    arrays=tokens(N=20, B=1),
    options={"alibi": True, "causal": True},
  ),
  Case(
    name="ALiBi, last queries",
    source="lucidrains/x-transformers#103",
    symptom="positions are counted from the first key",
    arrays=tokens(T=5, S=23),
    options={"alibi": True, "causal": True, "query_offset": 18},
  ),
  Case(
    name="ALiBi, padded",
    source="mosaicml/llm-foundry#186; lucidrains/x-transformers#85",
    symptom="the bias is lost, or shifted, once a mask is given",
    arrays=tokens(N=8) | {"mask": key_mask(11, 6, keys=11)},
    options={"alibi": True, "causal": True},
  ),
  Case(
    name="ALiBi, permuted with its positions",
    source="law 4",
    symptom="slots are taken for positions",
    arrays=tokens(),
    options={"alibi": True},
    law=laws.permutes_with_its_tokens,
  ),
  Case(
    name="ALiBi in half precision, far away",
    source="vllm-project/vllm#945",
    symptom="slope times position is rounded before the difference is taken",
    arrays=tokens(T=64),
    options={"alibi": True, "causal": True},
    law=laws.depends_on_distances,
    dtype="float16",
  ),
  # Large numbers in tables
  Case(
    name="rows of -1e9 within a table",
    source="law 15",
    symptom="subtracting that row from all others leaves no digits",
    arrays=tokens(T=16)
    | {"distance_bias": np.where(np.arange(9) == 2, -1e9, 0.5)[:, None].repeat(4, 1)},
  ),
  Case(
    name="a left end row of -1e9",
    source="law 15",
    symptom="subtracting the end row from all others leaves no digits",
    arrays=tokens(T=16)
    | {"distance_bias": np.where(np.arange(9) == 0, -1e9, 0.5)[:, None].repeat(4, 1)},
  ),
  # Rotary
  Case(
    name="rotary, halves",
    source="huggingface/transformers#25199; tenstorrent/tt-metal#26844",
    symptom="neighbouring elements are turned where halves should be",
    arrays=tokens(),
    options={"rotary": "halves"},
  ),
  Case(
    name="rotary, interleaved",
    source="huggingface/transformers#47403; ooples/AiDotNet#2074",
    symptom="halves are turned where neighbouring elements should be",
    arrays=tokens(),
    options={"rotary": "interleaved"},
  ),
  Case(
    name="rotary, last queries",
    source="pytorch/executorch#2010",
    symptom="with a cache queries are turned as if they were the first",
    arrays=tokens(T=5, S=23),
    options={"rotary": "halves", "causal": True, "query_offset": 18},
  ),
  Case(
    name="rotary, another offset first",
    source="lucidrains/rotary-embedding-torch#11",
    symptom="angles of the first call's offset are kept",
    arrays=tokens(),
    options={"rotary": "interleaved"},
    law=laws.is_fresh,
  ),
]
