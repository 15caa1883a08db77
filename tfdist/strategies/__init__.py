"""Distribution strategies that train Keras 3 models as on one device."""
