"""Drafters of any transformers target: prompt lookup and small models."""
