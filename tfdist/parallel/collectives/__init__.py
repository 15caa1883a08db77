"""Collectives between replicas within a step."""
