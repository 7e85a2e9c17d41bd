"""Chooses the fastest method on this machine by measurement, remembers and reports it."""
