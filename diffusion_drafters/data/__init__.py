"""Source code to learn from."""
