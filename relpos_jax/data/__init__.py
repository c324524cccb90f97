"""Sources of sentence pairs, tokenizers and batches; knows nothing of models."""
