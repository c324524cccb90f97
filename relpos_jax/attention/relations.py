"""The relations between query i and key j, with one file per family."""

from relpos_jax.attention.by_distance import (
  ByDistance,
  ContentBias,
  DistanceBias,
  KeyBias,
  LinearBias,
  RelativePositions,
)
from relpos_jax.attention.features import EdgeFeatures
from relpos_jax.attention.functions import FunctionBias
from relpos_jax.attention.labels import EdgeLabels, LabelBias
from relpos_jax.attention.relation import Relation, Relations

__all__ = [
  "ByDistance",
  "ContentBias",
  "DistanceBias",
  "EdgeFeatures",
  "EdgeLabels",
  "FunctionBias",
  "KeyBias",
  "LabelBias",
  "LinearBias",
  "Relation",
  "Relations",
  "RelativePositions",
]
