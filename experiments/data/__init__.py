"""Batches, tokenizers and data sets on disk; knows nothing of models."""
