"""Text continued by causal language models."""
