"""Translation: data, task, scores and report."""
