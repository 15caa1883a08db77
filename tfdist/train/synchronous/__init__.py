"""The engine of synchronous strategies."""
