"""Drafters of the core loop that draft a block in one forward: chains, trees, DiffuSpec's paths."""
