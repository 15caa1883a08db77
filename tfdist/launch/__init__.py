"""Launcher: starts and supervises one process per task of a cluster, without TensorFlow."""
