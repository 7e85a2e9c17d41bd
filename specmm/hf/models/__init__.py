"""Transformers models as targets: their parts, caches, states and tests."""
