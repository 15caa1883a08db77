"""Callbacks that save, log and profile a training on any number of workers."""
