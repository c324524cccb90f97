"""The operator, its relations and its implementations: pure functions of jax alone."""
