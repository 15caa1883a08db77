"""A training state becomes snapshots that survive whatever happens while they are written; no strategy and no model is known here."""
