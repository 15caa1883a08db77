"""Command-line tools for data sets and runs; no other part of tfdist imports them."""
