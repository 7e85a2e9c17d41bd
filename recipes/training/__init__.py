"""Trainings of tokenizers, autoencoders, targets and small models, on tensors."""
