"""Text corpora, tokenizers and the streams that turn both into batches."""
