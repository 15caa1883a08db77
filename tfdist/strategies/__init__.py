"""Strategies whose Keras 3 models train as on one device."""
