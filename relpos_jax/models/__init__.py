"""Networks from tokens or graphs to logits."""

from relpos_jax.models.graph_encoder import (
  GraphBatch,
  GraphEncoder,
  GraphEncoderConfig,
)
from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig
from relpos_jax.models.layers import Cache, LayersConfig, Memory, decoding_model
from relpos_jax.models.seq2seq import Transformer, TransformerConfig

__all__ = [
  "Cache",
  "GraphBatch",
  "GraphEncoder",
  "GraphEncoderConfig",
  "LanguageModel",
  "LanguageModelConfig",
  "LayersConfig",
  "Memory",
  "Transformer",
  "TransformerConfig",
  "decoding_model",
]
