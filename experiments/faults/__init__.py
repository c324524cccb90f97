"""Faults done to a real training, and what has to hold after them: `experiments.chaos`."""
