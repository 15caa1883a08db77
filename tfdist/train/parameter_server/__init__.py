"""The engine of parameter-server strategies."""
