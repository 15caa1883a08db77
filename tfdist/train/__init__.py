"""Keras' training methods become steps of many replicas; which strategy runs them is decided elsewhere."""
