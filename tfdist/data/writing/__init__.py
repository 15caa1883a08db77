"""Writing of Sources to TFRecord files."""
