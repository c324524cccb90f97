"""Scores, records, tables and pictures."""
