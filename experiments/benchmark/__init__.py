"""Measures the time and memory of attention and of training steps."""
