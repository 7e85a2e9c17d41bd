"""Transformers models as targets, whatever they read: their caches, positions, drafters, runs."""
