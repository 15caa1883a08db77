"""Audit of a data pipeline: read it as a run's workers would, and check every row."""

from tfdist.tools.audit.main import main

__all__ = ["main"]
