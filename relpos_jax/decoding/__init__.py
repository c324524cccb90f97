"""Beam search and sampling, for any step-wise decoder with a cache."""

from relpos_jax.decoding.beam import Hypotheses, Search, beam_search, begin, extend
from relpos_jax.decoding.sampling import (
  SamplingParams,
  filter_logits,
  prefill,
  sample,
)

__all__ = [
  "Hypotheses",
  "SamplingParams",
  "Search",
  "beam_search",
  "begin",
  "extend",
  "filter_logits",
  "prefill",
  "sample",
]
