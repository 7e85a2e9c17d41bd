"""Models of transformers that draw."""
