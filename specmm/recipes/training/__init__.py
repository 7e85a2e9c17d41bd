"""Trainings of drafters, on tensors."""
