"""Benchmarks of attention, training steps, decoding and memory."""
