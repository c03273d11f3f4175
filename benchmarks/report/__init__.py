"""What is done with measured figures: pure functions, tested in ``tests/unit/benchmarks/``."""
