"""Sources of examples: arrays, files, tables, TFRecords, TFDS, catalogs."""
