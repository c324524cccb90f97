"""Thin commands, and packages of what the larger ones are made of."""
