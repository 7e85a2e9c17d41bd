"""Transformers models of any input as targets: loading, prompts, drafters, pictures, answers."""
