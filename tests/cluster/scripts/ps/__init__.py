"""Exercise features of Keras: functions of a parameter-server strategy that raise on failure."""
