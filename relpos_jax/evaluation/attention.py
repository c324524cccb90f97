"""Where a translation model looked, as panels to draw."""

import functools

import jax
import numpy as np
from flax import nnx

from relpos_jax.data.tokenizer import BOS, Tokenizers, encode, pieces
from relpos_jax.evaluation.pictures import Panel
from relpos_jax.models.seq2seq import Transformer
from relpos_jax.typing import Array, Float, Int, PyTree


def attention_panels(
  model: Transformer, tokenizers: Tokenizers, source: str, target: str
) -> list[Panel]:
  """The encoder's first self-attention, and all attention from `target` to `source`.

  Weights are means over heads; those between the sentences over layers, too. A row of the second
  panel is the token that the decoder is about to write.
  """
  source_ids = encode(tokenizers.source, [source])[0]
  target_ids = encode(tokenizers.target, [target])[0]
  target_input = np.concatenate([[BOS], target_ids[:-1]])
  own, to_source = _weights(*nnx.split(model), source_ids[None], target_input[None])
  source_words = pieces(tokenizers.source, source_ids)
  target_words = pieces(tokenizers.target, target_ids)
  return [
    Panel("self-attention, encoder layer 1", np.asarray(own), source_words, source_words),
    Panel("translation to source", np.asarray(to_source), target_words, source_words),
  ]


@functools.partial(jax.jit, static_argnums=0)
def _weights(
  graphdef: nnx.GraphDef,
  params: PyTree,
  source: Int[Array, "1 S"],
  target_input: Int[Array, "1 T"],
) -> tuple[Float[Array, "S S"], Float[Array, "T S"]]:
  """Means over heads, and over layers of the decoder, of the weights that the layers sow."""
  model = nnx.merge(graphdef, params)
  model.set_attributes(sow_weights=True)
  _, sown = nnx.capture(model, nnx.Intermediate)(source, target_input)
  mean = lambda attention: attention["weights"][0][0].mean(axis=0)
  own = mean(sown["encoder"]["layers"][0]["self_attention"])
  to_source = [mean(layer["cross_attention"]) for layer in sown["decoder"]["layers"].values()]
  return own, sum(to_source) / len(to_source)
