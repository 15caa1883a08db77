"""Sources of examples: arrays, image files, tables, TFRecords, TFDS and catalogs."""
