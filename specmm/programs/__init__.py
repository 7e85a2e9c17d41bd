"""Rounds and steps as programs: compiled on a CPU, graphs on a GPU."""
