"""Modules of Keras' TensorFlow backend that are elsewhere in Keras 3.16 (keras #23642)."""

from __future__ import annotations

try:
    from keras.src.backend.tensorflow import numpy as numpy
except ImportError:  # since Keras 3.16
    from keras.src.backend.tensorflow.ops import numpy as numpy
