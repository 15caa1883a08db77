"""Training: the engines and callbacks behind Keras' `fit`, `evaluate` and `predict`."""
