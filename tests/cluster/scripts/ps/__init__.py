"""Features of Keras as functions of a parameter-server strategy, which raise on failure."""
