"""Collectives between the replicas of a strategy within a step."""
