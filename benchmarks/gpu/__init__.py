"""Benchmarks for machines with a GPU."""
