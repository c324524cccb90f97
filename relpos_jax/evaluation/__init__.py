"""BLEU, pictures and reports."""
