"""Snapshots of the training state that survive failures during a write.

This package depends on no strategy and no particular model.
"""
