"""Which model types of transformers are served: a tiny random model of each, asked."""
