"""Helpers that several benchmarks share, and what their processes run."""
