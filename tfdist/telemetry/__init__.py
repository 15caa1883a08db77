"""Scalar writers, step breakdown records and the file layout of run directories."""
