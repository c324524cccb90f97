"""The operator, its relations and its implementations: pure functions that need JAX."""
