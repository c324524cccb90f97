"""Graphs with labelled edges: data, task and scores."""
