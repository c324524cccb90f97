"""Benchmarks of attention and training steps."""
