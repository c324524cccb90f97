"""Thin commands: train, evaluate, translate."""
