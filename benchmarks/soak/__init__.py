"""Long runs that a test suite has no time for; their results are in benchmarks/results."""
