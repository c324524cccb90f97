"""Music: data, task, scores and report."""
