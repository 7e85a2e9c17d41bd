"""Trainings of drafters, and their data, for recipes."""
