"""Reads data sets, and makes tokens and batches of them, for any model."""
