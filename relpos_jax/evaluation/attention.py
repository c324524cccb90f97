"""Where a translation model looked, as panels to draw."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from relpos_jax.data.tokenizer import BOS, Tokenizers, encode, pieces
from relpos_jax.evaluation.pictures import Panel
from relpos_jax.models.seq2seq import Transformer
from relpos_jax.typing import Float


def attention_panels(
  model: Transformer, tokenizers: Tokenizers, source: str, target: str
) -> list[Panel]:
  """The encoder's first self-attention, and all attention from `target` to `source`.

  Weights are means over heads; those between the sentences over layers, too. A row of the second
  panel is the token that the decoder is about to write.
  """
  source_ids, target_ids = (
    encode(tokenizers.source, [source])[0],
    encode(tokenizers.target, [target])[0],
  )
  model = nnx.clone(model)
  model.set_attributes(sow_weights=True, raise_if_not_found=False)
  model(source_ids[None], np.concatenate([[BOS], target_ids[:-1]])[None])
  source_words = pieces(tokenizers.source, source_ids)
  target_words = pieces(tokenizers.target, target_ids)
  to_source = [_weights(layer.cross_attention) for layer in model.decoder.layers]
  own = _weights(model.encoder.layers[0].self_attention)
  return [
    Panel("self-attention, encoder layer 1", own, source_words, source_words),
    Panel("translation to source", np.mean(to_source, axis=0), target_words, source_words),
  ]


def _weights(layer) -> Float[np.ndarray, "T S"]:
  """The mean over heads of the weights that a layer sowed for one sentence."""
  (weights_BNTS,) = layer.weights.value
  return np.asarray(jnp.mean(weights_BNTS[0], axis=0))
