"""Translates sentences: data, training and scores."""
