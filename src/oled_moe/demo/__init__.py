"""Package data: the bundled demo model, its tokenizer and its held-out questions."""
