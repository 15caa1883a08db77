"""Shared helpers of the tfdist command-line tools."""
