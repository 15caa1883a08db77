"""Keras callbacks that save, log and profile training on any number of workers."""
