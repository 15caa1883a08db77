"""One configured training from its config to its summary."""
