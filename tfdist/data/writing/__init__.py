"""Writes a source as TFRecord files."""
