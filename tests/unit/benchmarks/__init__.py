"""The pure parts of the benchmarks."""
