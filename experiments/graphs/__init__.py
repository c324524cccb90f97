"""Graphs with labelled edges: data, task, scores and report."""
