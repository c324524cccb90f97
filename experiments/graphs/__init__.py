"""Classifies graphs with labelled edges: data, training and scores."""
