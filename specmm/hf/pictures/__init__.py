"""Transformers models that draw pictures."""
