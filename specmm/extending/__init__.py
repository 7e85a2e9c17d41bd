"""Registries of names, and third-party additions to them."""
