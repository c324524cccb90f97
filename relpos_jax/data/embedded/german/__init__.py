"""German: inflection, phrases, word order."""
