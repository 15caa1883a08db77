"""Shared helpers of the benchmarks, and the code of their processes."""
