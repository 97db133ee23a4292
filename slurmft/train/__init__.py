"""The built-in program: it fine-tunes a transformer."""
