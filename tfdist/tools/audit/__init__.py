"""The input pipeline of a run is read by as many processes as a run has, without a model, and checked row by row."""

from tfdist.tools.audit.main import main

__all__ = ["main"]
