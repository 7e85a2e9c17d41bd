"""Drafters for any transformers target."""
