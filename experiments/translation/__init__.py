"""Translation: data, task and scores."""
