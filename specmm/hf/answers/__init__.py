"""Runs of answers and texts: the call, its shared memory, and the choice of a method."""
