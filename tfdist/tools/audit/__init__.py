"""Audit of a data pipeline: read it as a run's workers would, and check every row."""
