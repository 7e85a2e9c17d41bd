"""Runs of answers and texts, what calls share, and the method they take."""
