"""Continues texts by causal language models."""
