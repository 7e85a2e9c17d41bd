"""Training of a text target and of the drafters for it."""
