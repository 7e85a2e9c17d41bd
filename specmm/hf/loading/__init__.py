"""Loads transformers models from folders onto their devices."""
