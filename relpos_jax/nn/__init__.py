"""Flax NNX layers."""
