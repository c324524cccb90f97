"""Models: whole networks, from tokens to logits."""
