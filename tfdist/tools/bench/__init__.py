"""Setups become rates side by side: how much faster more replicas are, and what the rest of the time goes into."""
