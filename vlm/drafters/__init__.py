"""Drafters of vision-language models."""
