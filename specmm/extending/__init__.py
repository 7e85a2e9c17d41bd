"""Registries of names, and what others add to them."""
