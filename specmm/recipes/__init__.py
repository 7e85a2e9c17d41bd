"""Trainings as recipes: a config file each (``deer.toml``), and the functions that they name."""
