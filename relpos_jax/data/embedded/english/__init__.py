"""English: inflection, phrases, word order."""
