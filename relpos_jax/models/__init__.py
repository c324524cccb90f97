"""Networks from tokens or graphs to logits."""
