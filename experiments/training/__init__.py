"""State, step, loss, schedule, sharding, checkpoints and the loop."""
