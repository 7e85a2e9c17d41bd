"""Trainings of drafters and their data: what recipes run."""
