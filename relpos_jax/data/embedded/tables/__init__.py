"""The word tables."""
