"""Engine of parameter-server training: a coordinator that dispatches steps to workers."""
