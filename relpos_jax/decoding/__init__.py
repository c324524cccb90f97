"""Beam search and sampling."""
