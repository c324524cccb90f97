"""Where a translation model looked, as panels to draw."""

import functools

import jax
import jax.numpy as jnp
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
  source_ids, target_ids = (
    encode(tokenizers.source, [source.strip()])[0],
    encode(tokenizers.target, [target])[0],
  )
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
  graphdef: nnx.GraphDef, state: PyTree, source: Int[Array, "1 S"], target: Int[Array, "1 T"]
) -> tuple[Float[Array, "S S"], Float[Array, "T S"]]:
  """What the layers sowed for one sentence and its translation."""
  model = nnx.merge(graphdef, state)
  model.set_attributes(sow_weights=True, raise_if_not_found=False)
  _, sown = nnx.capture(model, nnx.Intermediate)(source, target)
  mean_over_heads = lambda attention: jnp.mean(attention["weights"][0][0], axis=0)
  to_source = [mean_over_heads(x["cross_attention"]) for x in sown["decoder"]["layers"].values()]
  own = mean_over_heads(sown["encoder"]["layers"][0]["self_attention"])
  return own, jnp.mean(jnp.stack(to_source), axis=0)
