"""Synchronous training: engine, training loop, gradient aggregation and local SGD."""
