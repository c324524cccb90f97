"""Trains models: loss, step, loop, sharding, checkpoints and metrics."""
