"""From a folder to a model of transformers where it runs."""
