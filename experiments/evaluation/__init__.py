"""Computes scores; writes records, tables and pictures."""
