"""What is measured and how: ``python -m benchmarks.run --help``."""
